"""Collect: rollouts of one policy version, written down while they run.

Invariants: each planned rollout is in the committed dataset exactly once; rollouts that an interrupted attempt had finished are
kept, and only the missing ones are generated, under the same seeds. Of these, the model calls that were finished are not made
again where the environment can be restored (`roundhouse.rollout.replay`); where it cannot, the manifest says how often and why.
"""

from __future__ import annotations

from roundhouse.collection.collector import (
    Collected,
    Progress,
    metrics_by_environment,
    open_collector,
    refuse_many_failures,
)
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec, sample_rounds
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, StageKind, read_table
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables


def collect_iteration(
    run: Run, iteration: int, weights: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect the training rollouts of an iteration with the policy version that `weights` refitted the engine to."""
    return _collect(run, run.stage(iteration, StageKind.COLLECT), weights, engine_url, progress)


def collect_dataset(
    run: Run, name: str, draw: TaskDraw, checkpoint: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect rollouts of a checkpoint into `datasets/<name>/`, outside any training iteration. The same again is a no-op."""
    stage = dataset_stage(run, name, draw.label(checkpoint.policy_version), draw)
    return _collect(run, stage, checkpoint, engine_url, progress)


def _collect(run: Run, stage: Stage, weights: Reference, engine_url: str, progress: Progress | None) -> Reference:
    """Collect one round, or round after round (`roundhouse.rollout.plan`), into one stage."""
    if (done := stage.reference()) is not None:
        return done
    config = run.config
    tasks = open_environment(config.environment).tasks("train")
    collection = open_collector(run, stage, weights.policy_version)
    planned, seconds = 0, 0.0

    def roll_out(specs: list[RolloutSpec]) -> list[Rollout]:
        nonlocal planned, seconds
        before = planned
        planned += len(specs)

        def on_progress(finished: int, _: int) -> None:
            if progress is not None:
                progress(before + finished, planned)

        collected = collection.collect(specs, config.generation.sampling, engine_url, on_progress)
        refuse_many_failures(collected.rollouts, config.rollout, engine_url)
        seconds += collected.window_seconds
        return collected.rollouts

    sampled = sample_rounds(tasks, config.rollout, config.seed, stage.iteration, roll_out)
    ledger = Ledger.from_rollouts(sampled.rollouts, requested=planned)
    collected = Collected(sampled.rollouts, seconds)
    return collection.commit(
        inputs={"weights": weights},
        counts=ledger.counts(),
        metrics=collected.metrics()
        | metrics_by_environment(config, sampled.rollouts, "mixture/")
        | collection.metrics()
        | sampled.metrics(),
        details={"failures": ledger.failures, "sampling": config.generation.sampling.model_dump()} | sampled.details(),
    )


def read_rollouts(reference: Reference) -> list[Rollout]:
    """The rollouts of a complete collect or evaluate stage."""
    return rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))
