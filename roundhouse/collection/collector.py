"""How a stage collects rollouts of one policy version: the interface, the collector in this process, and the metrics.

Invariant: when `collect` returns, each rollout that was asked for is in the store with its turns, and `commit` makes exactly
these the stage's datasets. The collector over several workers is `roundhouse.collection.sharded_collector`.

Denominators of the metrics: `reward/*` over rewarded rollouts (failed ones have none); `rollout/*` over rollouts that made at
least one model call; rates over all requested ones.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roundhouse.collection.parts import Parts
from roundhouse.config.models import RolloutConfig, RunConfig, Sampling
from roundhouse.errors import TooFewRollouts
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.health.watchdog import run_interruptible
from roundhouse.progress import announce
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.collector import collect
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.manifest import Reference
from roundhouse.trajectories.records import Rollout, Status

Progress = Callable[[int, int], None]
"""Called with (finished, planned)."""


@dataclass(frozen=True)
class Collected:
    """All planned rollouts, in the plan's order."""

    rollouts: list[Rollout]
    """Collected elsewhere, they are here without words and token IDs (`trajectories.outlines`)."""
    window_seconds: float
    """Wall time in which rollouts ran: engine, environment and agent loop together."""

    def metrics(self) -> dict[str, float]:
        generated = sum(len(turn.generation_token_ids) for rollout in self.rollouts for turn in rollout.turns)
        rates = {"rollout/tokens_per_second": generated / self.window_seconds} if self.window_seconds > 0 else {}
        return rollout_metrics(self.rollouts) | {"time/rollouts": self.window_seconds} | rates


class RolloutCollector(Protocol):
    """Of one attempt at a stage."""

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        """Collect what is missing of `specs`; called again for another round. `on_policy` as for `gym.collector.collect`."""
        ...

    def metrics(self) -> dict[str, float]:
        """How it went: interrupted rollouts, shards."""
        ...

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        """Make the stage complete with all that was collected."""
        ...


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Reward, lengths and outcome rates."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    started = [rollout for rollout in rollouts if rollout.turns]
    generated = [sum(len(turn.generation_token_ids) for turn in rollout.turns) for rollout in started]
    total = [rollout.turns[-1].prompt_length + len(rollout.turns[-1].generation_token_ids) for rollout in started]
    metrics: dict[str, float] = {}
    if rewards:
        metrics |= {
            "reward/mean": mean(rewards),
            "reward/std": deviation(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }
    if started:
        metrics |= {
            "rollout/turns_mean": mean([len(rollout.turns) for rollout in started]),
            "rollout/generated_tokens_mean": mean(generated),
            "rollout/generated_tokens_max": max(generated),
            "rollout/total_tokens_mean": mean(total),
            "rollout/total_tokens_max": max(total),
            "rollout/generated_tokens": float(sum(generated)),
            "rollout/seconds_mean": mean([rollout.seconds for rollout in started]),
            "rollout/seconds_max": max(rollout.seconds for rollout in started),
            "rollout/generation_seconds_mean": mean([rollout.generation_seconds for rollout in started]),
            "rollout/environment_seconds_mean": mean([rollout.environment_seconds for rollout in started]),
        }
    if rollouts:
        for status in Status:
            metrics[f"rollout/{status.value}_rate"] = mean([float(rollout.status is status) for rollout in rollouts])
    return metrics | _failure_metrics(rollouts) | _environment_metrics(rollouts)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))


def _failure_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many rollouts failed, by kind and by code."""
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    kinds = Counter(f"failures/{rollout.failure_kind or 'unknown'}" for rollout in failed)
    codes = Counter(f"failures/code/{rollout.failure_code or 'unknown'}" for rollout in failed)
    return {name: float(count) for name, count in sorted((kinds + codes).items())}


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of what the environment reported, each over the rollouts that report it."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found.setdefault(f"environment/{name}", []).append(value)
        for name, value in rollout.reward_components.items():
            found.setdefault(f"reward/{name}", []).append(value)
    return {name: mean(values) for name, values in sorted(found.items())}


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
