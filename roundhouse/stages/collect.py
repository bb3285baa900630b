"""Collect: rollouts of one policy version, written down while they run.

Invariants: each planned rollout is in the committed dataset exactly once; rollouts that an interrupted attempt had finished are
kept, and only the missing ones are generated, under the same seeds. Of these, the model calls that were finished are not made
again where the environment can be restored (`roundhouse.rollout.replay`); where it cannot, the manifest says how often and why.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from roundhouse.collection.collector import Collected, Progress, RolloutCollector
from roundhouse.collection.parts import Parts
from roundhouse.collection.rounds import sample_rounds
from roundhouse.config.distribution import InProcessCollection
from roundhouse.config.models import RolloutConfig, RunConfig, Sampling
from roundhouse.errors import TooFewRollouts
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.health.watchdog import run_interruptible
from roundhouse.progress import announce
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.collector import collect
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, read_table
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import rollouts_from_tables

__all__ = [
    "Collected",
    "Progress",
    "collect_dataset",
    "collect_into",
    "collect_iteration",
    "open_collection",
    "read_rollouts",
    "refuse_many_failures",
]


def collect_iteration(
    run: Run, iteration: int, weights: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect the training rollouts of an iteration with the policy version that `weights` refitted the engine to."""
    return _collect(run, run.stage(iteration, "collect"), weights, engine_url, progress)


def collect_dataset(
    run: Run, name: str, draw: TaskDraw, checkpoint: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect rollouts of a checkpoint into `datasets/<name>/`, outside any training iteration. The same again is a no-op."""
    stage = dataset_stage(run, name, draw.label(checkpoint.policy_version), draw)
    return _collect(run, stage, checkpoint, engine_url, progress)


def _collect(run: Run, stage: Stage, weights: Reference, engine_url: str, progress: Progress | None) -> Reference:
    """Collect one round, or round after round (`roundhouse.collection.rounds`), into one stage."""
    if (done := stage.reference()) is not None:
        return done
    config = run.config
    tasks = open_environment(config.environment).tasks("train")
    collection = open_collection(run, stage, weights.policy_version)
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
        metrics=collected.metrics() | collection.metrics() | sampled.metrics(),
        details={"failures": ledger.failures, "sampling": config.generation.sampling.model_dump()} | sampled.details(),
    )


def open_collection(run: Run, stage: Stage, policy_version: int) -> RolloutCollector:
    """A new attempt at a stage, by whoever `rollout.distribution` says."""
    if isinstance(run.config.rollout.distribution, InProcessCollection):
        return InProcessCollector(run.config, Parts(run.begin(stage, policy_version=policy_version), policy_version))
    from roundhouse.collection.sharded_collector import ShardedCollector

    return ShardedCollector(run, stage, policy_version)


class InProcessCollector:
    """A `RolloutCollector` by this process alone."""

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self.commit = parts.commit

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        return collect_into(self._parts, specs, self._config, sampling, engine_url, progress, on_policy=on_policy)

    def metrics(self) -> dict[str, float]:
        return self._parts.journal.resumptions.metrics()


def collect_into(
    parts: Parts,
    specs: Sequence[RolloutSpec],
    config: RunConfig,
    sampling: Sampling,
    engine_url: str,
    progress: Progress | None = None,
    *,
    on_policy: bool = True,
    engine_version: int | None = None,
) -> Collected:
    """Collect what is missing of `specs`, so that all of them are in the parts of the newest attempt; `on_policy` as for
    `gym.collector.collect`. `engine_version` is the one that the engine holds, where it is not that of the parts."""
    kept = parts.keep(specs)
    missing = [spec for spec in specs if spec.rollout_id not in kept]
    finished = len(kept)

    def on_rollout(rollout: Rollout) -> None:
        nonlocal finished
        finished += 1
        parts.add(rollout)
        tokens = sum(len(turn.generation_token_ids) for turn in rollout.turns)
        announce("rollout", tokens=tokens, reward=rollout.reward)
        if progress is not None:
            progress(finished, len(specs))

    async def work() -> list[Rollout]:
        environment = open_environment(config.environment)
        async with HttpPolicyClient(engine_url, config.generation) as policy, environment, parts.flushing():
            return await collect(
                missing,
                policy,
                environment,
                config.rollout,
                sampling,
                on_rollout,
                on_policy=on_policy,
                policy_version=parts.policy_version if engine_version is None else engine_version,
                journal=parts.journal,
            )

    started = time.monotonic()
    try:
        fresh = {rollout.rollout_id: rollout for rollout in run_interruptible(work())}
    finally:  # also when it was ended from outside
        parts.flush()
    window = time.monotonic() - started
    return Collected([kept.get(spec.rollout_id) or fresh[spec.rollout_id] for spec in specs], window)


def read_rollouts(reference: Reference) -> list[Rollout]:
    """The rollouts of a complete collect or evaluate stage."""
    return rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))


def refuse_many_failures(rollouts: Sequence[Rollout], config: RolloutConfig, engine_url: str) -> None:
    """
    Raises:
        TooFewRollouts: a larger share than `rollout.max_failed_fraction` failed.
    """
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    if len(failed) <= config.max_failed_fraction * len(rollouts):
        return
    first = failed[0]
    raise TooFewRollouts(
        f"{len(failed)} of {len(rollouts)} rollouts failed, more than rollout.max_failed_fraction="
        f"{config.max_failed_fraction} allows. The first: {first.failure_code}: {first.failure_detail} (engine: {engine_url}). "
        "What finished is kept; the next attempt generates only the rest."
    )
