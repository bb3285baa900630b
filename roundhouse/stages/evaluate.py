"""Evaluate: held-out tasks, answered by one policy version.

Iteration k's evaluation is of version k, the one its training made; iteration 0's is of the starting policy. Each of
`evaluation.sets` is a further stage, `evaluate-<name>`, with metrics `evaluation/<name>/…`.

Estimates and their intervals are pure functions of rewards. Tasks are independent and the rollouts of one task are one cluster,
so every interval is over tasks; the same rewards always give the same interval.

    {"a": [1, 0], "b": [1, 1]}     mean 0.75     pass@1 0.75     pass@2 1.0
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundhouse.collection.collector import deviation, mean, refuse_many_failures, rollout_metrics
from roundhouse.collection.in_process_runner import open_collector
from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.models import RunConfig
from roundhouse.config.operations import evaluation_sampling, with_set
from roundhouse.environments import has_own_splits
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError
from roundhouse.generation.deployment import counted_at
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages.collect import Progress
from roundhouse.stages.task_survey import survey_of, tasks_in_training
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, StageKind
from roundhouse.trajectories.records import Ledger, Rollout, pass_at_k

EVALUATION_SEED = 7
"""Evaluations of all versions draw with the same seeds, so that their difference is the policy's."""


def evaluate_version(
    run: Run, version: int, engine_url: str, progress: Progress | None = None, name: str | None = None
) -> Reference:
    """Evaluate a policy version after its refit; with `name`, on that one of `evaluation.sets`.

    Raises:
        ConfigError: the environment does not have a held-out task.
        TooFewRollouts, FailingRollouts: a larger share than `rollout.max_failed_fraction` failed; the next attempt
            makes these again.
    """
    stage = run.stage(version, stage_of(name))
    if (reference := stage.reference()) is not None:
        return reference
    trains_on = run.config
    if name is not None:
        run = dataclasses.replace(run, config=with_set(run.config, name))
    config = run.config
    checkpoint = run.checkpoint(version).reference()
    rows = list(open_environment(config.environment).tasks("heldout"))[: config.evaluation.tasks]
    if not rows:
        raise no_heldout_task(config)
    specs = plan_rollouts(rows, config.evaluation.samples, EVALUATION_SEED, 0)
    collection = open_collector(run, stage, version)
    if progress is not None:
        progress(0, len(specs))  # the refit was the present activity
    collected = collection.collect(specs, evaluation_sampling(config), engine_url, progress, on_policy=False)
    refuse_many_failures(collected.rollouts, config.rollout, engine_url)
    ledger = Ledger.from_rollouts(collected.rollouts, requested=len(specs))
    threshold = config.evaluation.success_threshold
    metrics = evaluation_metrics(collected.rollouts, threshold, name)
    if (shared := _tasks_in_training(trains_on, config.environment, rows)) is not None:
        metrics[f"evaluation/{'' if name is None else f'{name}/'}{IN_TRAINING}"] = float(shared)
    for part in config.environment.parts:
        own = [rollout for rollout in collected.rollouts if rollout.group_id.startswith(f"{part}/")]
        metrics |= evaluation_metrics(own, threshold, part if name is None else f"{name}/{part}")
    return collection.commit(
        inputs={} if checkpoint is None else {"checkpoint": checkpoint},
        counts=ledger.counts(),
        metrics=metrics,
        details={"failures": ledger.failures, "engine_tokens": counted_at(engine_url)},
    )


IN_TRAINING = "tasks_in_training"


def _tasks_in_training(trains_on: RunConfig, environment: EnvironmentConfig, rows: Sequence[TaskRow]) -> int | None:
    """Return how many of the evaluated rows are training tasks of the run; None if it trains on datasets."""
    if trains_on.offline is not None:
        return None
    if environment == trains_on.environment and has_own_splits(environment):
        return 0
    training = survey_of(open_environment(trains_on.environment).tasks("train"))
    return len(tasks_in_training(training, rows))


def stage_of(name: str | None) -> str:
    """The stage of an evaluation: `evaluate`, or `evaluate-<name>` of one of `evaluation.sets`."""
    return StageKind.EVALUATE if name is None else f"{StageKind.EVALUATE}-{name}"


def set_of(stage: str) -> str | None:
    """Return the name in `evaluation.sets` of this stage; None for all other stages."""
    name = stage.removeprefix(stage_of(""))
    return None if name == stage else name


def no_heldout_task(config: RunConfig) -> ConfigError:
    """Return the error that held-out tasks are missing."""
    environment = config.environment
    keys = [key for key in ("heldout_tasks", "heldout_data", "heldout_fraction") if hasattr(environment, key)]
    where = f"Set environment.{keys[0]}" if keys else "Give some from the environment's tasks('heldout')"
    return ConfigError(
        f"environment.kind is {environment.kind} and has no held-out task to evaluate. {where}, or "
        "train without evaluation: evaluation: {every: null, before_training: false}."
    )


def evaluation_metrics(
    rollouts: Sequence[Rollout], success_threshold: float = 1.0, name: str | None = None
) -> dict[str, float]:
    """Mean held-out reward with its standard error and 95 % interval, pass@k, and the rollouts' own metrics.

    Tasks are independent and the samples of one task are one cluster (`roundhouse.stages.evaluate`).
    """
    rewards = rewards_by_task(rollouts)
    metrics = rollout_metrics(rollouts)
    if rewards:
        means = list(task_means(rewards).values())
        interval = mean_interval(means)
        metrics |= {
            "reward/mean": mean(means),
            "reward/stderr": deviation(means) / math.sqrt(len(means)),
            "reward/low": interval.low,
            "reward/high": interval.high,
            "tasks": float(len(means)),
            **{f"pass_at_{k}": mean_pass_at_k(rewards, k, success_threshold) for k in reported_ks(rewards)},
        }
    prefix = "evaluation" if name is None else f"evaluation/{name}"
    return {f"{prefix}/{metric}": value for metric, value in metrics.items()}


def rewards_by_task(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return each task's rewards, without failed and masked rollouts."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        if (reward := rollout.counted_reward) is not None:
            rewards.setdefault(rollout.group_id, []).append(reward)
    return rewards


RESAMPLES = 2000
"""Bootstrap samples: the ends of a 95 % interval then move by about a tenth of the standard error from seed to seed."""

ROUNDING = 1e-9
"""A reward that misses the threshold by less reaches it: 0.7 + 0.2 + 0.1 is not quite 1."""

Rewards = Mapping[str, Sequence[float]]
"""Rewards of the rollouts per task, without failed rollouts."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the interval that holds the true value with the confidence asked for."""

    value: float
    low: float
    high: float


def mean_pass_at_k(rewards: Rewards, k: int, threshold: float = 1.0) -> float:
    """Mean of `pass_at_k` over the tasks that have k rollouts; a rollout passes when its reward is at least the threshold."""
    enough = [task for task in rewards.values() if len(task) >= k]
    if not enough:
        raise ValueError(f"pass@{k}: no task has {k} rollouts with a reward")
    least = threshold - ROUNDING * max(1.0, abs(threshold))
    return math.fsum(pass_at_k(len(task), sum(reward >= least for reward in task), k) for task in enough) / len(enough)


def reported_ks(rewards: Rewards) -> list[int]:
    """Powers of two up to the rollouts that every task has."""
    fewest = min((len(task) for task in rewards.values()), default=0)
    return [2**power for power in range(fewest.bit_length()) if 2**power <= fewest]


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of one value a task, with its percentile bootstrap interval over tasks (Efron 1979).

    If the value is equal for all tasks, the interval's width is 0, but it does not bound unseen tasks: after n passed
    tasks, up to about 3 / n may still fail.
    """
    data = np.asarray(values, dtype=np.float64)
    if len(data) == 0:
        raise ValueError("an interval needs at least one task")
    draws = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    means = data[draws].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(data.mean()), float(low), float(high))


def task_means(rewards: Rewards) -> dict[str, float]:
    """Mean reward of each task."""
    return {task: math.fsum(values) / len(values) for task, values in rewards.items() if values}


def paired_difference(candidate: Rewards, incumbent: Rewards, confidence: float = 0.95) -> Interval:
    """Return the candidate's improvement over the tasks with rewards in both evaluations.

    Both answered the same tasks, so differences are taken per task and task difficulty cancels.

    Raises:
        ValueError: they do not share a task.
    """
    ours, theirs = task_means(candidate), task_means(incumbent)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ValueError("the two evaluations have no task in common")
    return mean_interval([ours[task] - theirs[task] for task in common], confidence)
