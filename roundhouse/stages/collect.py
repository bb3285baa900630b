"""Collect: rollouts of one policy version, stored while they run.

Invariants: each planned rollout is in the committed dataset exactly once. Finished rollouts of an interrupted attempt
are kept, and only missing ones are generated, with the same seeds. If the environment can be restored, their finished
model calls are not repeated (`roundhouse.rollout.replay`); otherwise the manifest has the number of restarts and the
reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from roundhouse.collection.collector import (
    Collected,
    Progress,
    metrics_by_environment,
    refuse_many_failures,
)
from roundhouse.collection.in_process_runner import open_collector
from roundhouse.config.rollout import Branching, RolloutConfig
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError
from roundhouse.generation.deployment import counted_at
from roundhouse.policy.model_directory import template_in
from roundhouse.policy.prompt_lengths import Prompts, longer_than_allowed, tokens_by
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec, Sampled, iterations_of, recorded_draw, sample_rounds
from roundhouse.rollout.recording import Branched, branched_groups, plan_branches
from roundhouse.stages.datasets import TaskDraw, dataset_stage
from roundhouse.stages.refit import engine_files
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, Stage, StageKind, read_table
from roundhouse.trajectories.records import Ledger, Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables

logger = logging.getLogger(__name__)

_fitting: dict[tuple[str, str], Sequence[TaskRow]] = {}
"""The tasks that fit `rollout.max_prompt_tokens`, by run uid and sections: rendering all of them takes time."""


def training_tasks(run: Run) -> Sequence[TaskRow]:
    """Return the run's training tasks without those with too long a prompt.

    Raises:
        ConfigError: the environment cannot be opened, or no task fits `rollout.max_prompt_tokens`.
    """
    tasks, rollout = open_environment(run.config.environment).tasks("train"), run.config.rollout
    if rollout.max_prompt_tokens is None:
        return tasks
    key = run.uid, run.config.model_dump_json(include={"environment", "rollout"})  # a collection may have other tasks
    if key not in _fitting:
        files = engine_files(run)
        prompts = Prompts(rollout, template_in(files), tokens_by((files / "tokenizer.json").read_bytes))
        _fitting[key] = prompts.fitting(tasks)
        if (report := longer_than_allowed(rollout, _fitting[key], tasks)) is not None:
            logger.info("%s", report)
    return _fitting[key]


def with_epochs(run: Run) -> Run:
    """Return the run, limited to the iterations of `rollout.epochs`.

    Raises:
        ConfigError: a fork begins after the last of them.
    """
    config = run.config
    if config.rollout.epochs is None:
        return run
    last = last_iteration(config.rollout, len(training_tasks(run)), run.first_version)
    return replace(run, config=config.model_copy(update={"iterations": min(config.iterations, last)}))


def last_iteration(rollout: RolloutConfig, tasks: int, first_version: int) -> int:
    """Return the iteration with which `rollout.epochs` end.

    Raises:
        ConfigError: a fork begins after it.
    """
    last = iterations_of(tasks, rollout)
    if last <= first_version:
        raise ConfigError(
            f"rollout.epochs is {rollout.epochs}, which end with iteration {last}, and the run begins from version "
            f"{first_version}. Raise rollout.epochs."
        )
    return last


def collect_iteration(
    run: Run, iteration: int, weights: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect the training rollouts of an iteration with the policy version that `weights` refitted the engine to."""
    stage = run.stage(iteration, StageKind.COLLECT)
    return _collect(run, stage, weights, engine_url, progress, branching=run.config.rollout.branching)


def collect_dataset(
    run: Run, name: str, draw: TaskDraw, checkpoint: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect rollouts of a checkpoint into `datasets/<name>/`, outside any training iteration. The same again is a no-op."""
    stage = dataset_stage(run, name, draw.label(checkpoint.policy_version), draw)
    return _collect(run, stage, checkpoint, engine_url, progress)


def _collect(
    run: Run,
    stage: Stage,
    weights: Reference,
    engine_url: str,
    progress: Progress | None,
    branching: Branching | None = None,
) -> Reference:
    """Collect one round, or round after round (`roundhouse.rollout.plan`), and then branches of these, into one stage."""
    if (reference := stage.reference()) is not None:
        return reference
    config = run.config
    tasks, draw = training_tasks(run), recorded_draw(run, weights.policy_version)
    collection = open_collector(run, stage, weights.policy_version)
    planned, seconds = 0, 0.0

    def make(specs: list[RolloutSpec]) -> list[Rollout]:
        nonlocal planned, seconds
        before = planned
        planned += len(specs)

        def on_progress(finished: int, _: int) -> None:
            if progress is not None:
                progress(before + finished, planned)

        on_progress(0, 0)  # the refit was the present activity
        collected = collection.collect(specs, config.generation.sampling, engine_url, on_progress)
        seconds += collected.window_seconds
        return collected.rollouts

    def roll_out(specs: list[RolloutSpec]) -> list[Rollout]:
        rollouts = make(specs)
        refuse_many_failures(rollouts, config.rollout, engine_url)
        return rollouts

    sampled = sample_rounds(
        tasks, config.rollout, config.seed, stage.iteration, roll_out, draw.history, first_draw=run.first_draw
    )
    parts: list[Sampled | Branched] = [sampled]
    branches: Sequence[Rollout] = []
    if branching is not None:
        groups = branched_groups(sampled)
        whole = collection.whole(sampled.rollouts, groups)
        taken = {rollout.group_id for rollout in sampled.rollouts}
        if specs := plan_branches(whole, groups, branching, config.seed, stage.iteration, taken):
            branches = make(specs)
            parts.append(Branched(specs, branches))
    rollouts = [*sampled.rollouts, *branches]
    refuse_many_failures(rollouts, config.rollout, engine_url)
    ledger = Ledger.from_rollouts(rollouts, requested=planned)
    collected = Collected(sampled.rollouts, seconds, branches)
    return collection.commit(
        inputs={"weights": weights} | draw.inputs,
        counts=ledger.counts(),
        metrics=collected.metrics()
        | metrics_by_environment(config, sampled.rollouts, "mixture/")
        | collection.metrics()
        | {name: value for each in parts for name, value in each.metrics().items()}
        | draw.metrics(sampled.tasks),
        details={"failures": ledger.failures, "sampling": config.generation.sampling.model_dump()}
        | {"engine_tokens": counted_at(engine_url)}
        | {name: value for each in parts for name, value in each.details().items()},
    )


def read_rollouts(reference: Reference) -> list[Rollout]:
    """The rollouts of a complete collect or evaluate stage."""
    return rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))
