"""Evaluate: held-out tasks, answered by one policy version.

Iteration k's evaluation is of version k, the one its training made; iteration 0's is of the starting policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundhouse.collection.collector import deviation, mean, refuse_many_failures, rollout_metrics
from roundhouse.collection.sharded_collector import open_collector
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.stages.collect import Progress
from roundhouse.stages.estimates import mean_interval, mean_pass_at_k, reported_ks, task_means
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout

EVALUATION_SEED = 7
"""Evaluations of all versions draw with the same seeds, so that their difference is the policy's."""


def evaluate_version(run: Run, version: int, engine_url: str, progress: Progress | None = None) -> Reference:
    """Evaluate a policy version that the engine has been refitted to.

    Raises:
        ConfigError: the environment has no held-out task.
        TooFewRollouts: a larger share than `rollout.max_failed_fraction` failed; the next attempt makes these again.
    """
    config = run.config
    stage = run.stage(version, StageKind.EVALUATE)
    if (done := stage.reference()) is not None:
        return done
    checkpoint = run.checkpoint(version).reference()
    rows = list(open_environment(config.environment).tasks("heldout"))[: config.evaluation.tasks]
    if not rows:
        raise no_heldout_task(config)
    specs = plan_rollouts(rows, config.evaluation.samples, EVALUATION_SEED, 0)
    collection = open_collector(run, stage, version)
    sampling = config.generation.sampling.model_copy(update={"temperature": config.evaluation.temperature})
    collected = collection.collect(specs, sampling, engine_url, progress, on_policy=False)
    refuse_many_failures(collected.rollouts, config.rollout, engine_url)
    ledger = Ledger.from_rollouts(collected.rollouts, requested=len(specs))
    return collection.commit(
        inputs={} if checkpoint is None else {"checkpoint": checkpoint},
        counts=ledger.counts(),
        metrics=evaluation_metrics(collected.rollouts, config.evaluation.success_threshold),
        details={"failures": ledger.failures},
    )


def no_heldout_task(config: RunConfig) -> ConfigError:
    """That there is nothing to evaluate on."""
    environment = config.environment
    keys = [key for key in ("heldout_tasks", "heldout_data", "heldout_fraction") if hasattr(environment, key)]
    where = f"Set environment.{keys[0]}" if keys else "Give some from the environment's tasks('heldout')"
    return ConfigError(
        f"environment.kind is {environment.kind} and has no held-out task, so there is nothing to evaluate on. {where}, or "
        "train without evaluation: evaluation: {every: null, before_training: false}."
    )


def evaluation_metrics(rollouts: Sequence[Rollout], success_threshold: float = 1.0) -> dict[str, float]:
    """Mean held-out reward with its standard error and 95 % interval, pass@k, and the rollouts' own metrics.

    Tasks are independent and the samples of one task are one cluster (`roundhouse.stages.estimates`).
    """
    rewards = rewards_by_task(rollouts)
    metrics = {f"evaluation/{name}": value for name, value in rollout_metrics(rollouts).items()}
    if not rewards:
        return metrics
    means = list(task_means(rewards).values())
    interval = mean_interval(means)
    return metrics | {
        "evaluation/reward/mean": mean(means),
        "evaluation/reward/stderr": deviation(means) / math.sqrt(len(means)),
        "evaluation/reward/low": interval.low,
        "evaluation/reward/high": interval.high,
        "evaluation/tasks": float(len(means)),
        **{f"evaluation/pass_at_{k}": mean_pass_at_k(rewards, k, success_threshold) for k in reported_ks(rewards)},
    }


def rewards_by_task(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Rewards of each task's rollouts; a failed rollout has none."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            found.setdefault(rollout.group_id, []).append(rollout.reward)
    return found
