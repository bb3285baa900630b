"""How a stage collects rollouts of one policy version: in this process, or in shards by several workers; and the metrics.

Invariant: when `collect` returns, each rollout that was asked for is in the store with its turns, and `commit` makes exactly
these the stage's datasets, once each, whoever collected them.

Each worker collects its shard of the plan as one process would all of it. A shard that has left its report is not collected
again, by this attempt or a later one, unless rollouts of it failed; one that was lost resumes with what it had written. When
`collect` returns or raises, no worker is left at work.

    plan ── split ──┬── s0001of0003  report there ─────────────────┐
                    ├── s0002of0003  worker ── lost ── worker ── report ── adopt files, add ledgers ── one manifest
                    └── s0003of0003  worker ── report ─────────────┘

Denominators of the metrics: `reward/*` over rewarded rollouts (failed ones have none); `rollout/*` over rollouts that made at
least one model call; rates over all requested ones.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from roundhouse.activity import announce
from roundhouse.collection.parts import Parts
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.collection.shards import Shard, shares, split
from roundhouse.config.environments import MixtureEnvironment
from roundhouse.config.models import RolloutConfig, RunConfig, Sampling
from roundhouse.config.rollout import InProcessCollection
from roundhouse.errors import InfraError, TooFewRollouts
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.health.watchdog import Interrupted, run_interruptible
from roundhouse.launch.base import Launcher, Program, Stopped
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.collector import collect
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage
from roundhouse.trajectories.records import Rollout, Status

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (finished, planned)."""


LOOK_SECONDS = 0.2
"""How often progress is reported, and an interruption noticed."""


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
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    kinds = Counter(f"failures/{rollout.failure_kind or 'unknown'}" for rollout in failed)
    codes = Counter(f"failures/code/{rollout.failure_code or 'unknown'}" for rollout in failed)
    metrics |= {name: float(count) for name, count in sorted((kinds + codes).items())}
    reported: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            reported.setdefault(f"environment/{name}", []).append(value)
        for name, value in rollout.reward_components.items():
            reported.setdefault(f"reward/{name}", []).append(value)
    return metrics | {name: mean(values) for name, values in sorted(reported.items())}


def metrics_by_environment(config: RunConfig, rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """The metrics of each environment of a mixture's rollouts, under `<prefix><environment>/`; of one environment none."""
    if not isinstance(config.environment, MixtureEnvironment):
        return {}
    return {
        f"{prefix}{name}/{metric}": value
        for name in config.environment.environments
        for metric, value in rollout_metrics(
            [each for each in rollouts if each.group_id.startswith(f"{name}/")]
        ).items()
    }


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))


class InProcessCollector:
    """Of one attempt at a stage: by this process alone."""

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self.metrics, self.commit = parts.metrics, parts.commit
        """How it went, and the completion of the stage with all that was collected."""

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        """Collect what is missing of `specs`; again for another round. `on_policy` as for `rollout.collector.collect`."""
        return collect_into(self._parts, specs, self._config, sampling, engine_url, progress, on_policy=on_policy)


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
    `rollout.collector.collect`. `engine_version` is the one that the engine holds, where it is not that of the parts."""
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


class ShardedCollector:
    """The same by the workers of `rollout.distribution`."""

    def __init__(self, run: Run, stage: Stage, policy_version: int) -> None:
        self._run = run
        self._sharded = ShardedAttempt(run, stage, policy_version)
        self._rounds = 0
        self.metrics, self.commit = self._sharded.metrics, self._sharded.commit

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        self._rounds += 1
        sharded = self._sharded
        shards = split(specs, sharded.distribution.shards)
        concurrency = self._run.config.rollout.concurrency
        limits = [None] * len(shards) if concurrency is None else shares(concurrency, len(shards))
        tasks = [
            sharded.task(shard, sampling, engine_url, limit, on_policy=on_policy, round_number=self._rounds)
            for shard, limit in zip(shards, limits, strict=True)
        ]
        before = [sharded.left_before(shard, task) for shard, task in zip(shards, tasks, strict=True)]
        found = {outcome.label: outcome for outcome in before if outcome is not None}
        missing = [(shard, task) for shard, task in zip(shards, tasks, strict=True) if shard.label not in found]
        if missing:
            kept = sum(len(outcome.rollouts) for outcome in found.values())
            with sharded.open_launcher([task for _, task in missing]) as launcher:
                work = _Round(sharded, launcher, kept, len(specs), progress)
                found |= {outcome.label: outcome for outcome in work.carry_out(missing)}
            sharded.spend(launcher.metrics())
        outcomes = [found[shard.label] for shard in shards]
        sharded.take(outcomes)
        seconds = max((outcome.report.seconds for outcome in outcomes if outcome.fresh), default=0.0)
        return Collected([rollout for outcome in outcomes for rollout in outcome.rollouts], seconds)


class _Round:
    """The tasks of one round, each in a thread that waits for its worker."""

    def __init__(
        self, sharded: ShardedAttempt, launcher: Launcher, before: int, planned: int, progress: Progress | None
    ) -> None:
        self._sharded = sharded
        self._launcher = launcher
        self._before = before
        self._planned = planned
        self._progress = progress
        self._finished: dict[str, int] = {}
        self._reported = 0
        self._stopped = threading.Event()

    def carry_out(self, tasks: Sequence[tuple[Shard, Program]]) -> list[ShardOutcome]:
        """The outcomes, in order; the first error ends the other workers, and what they had finished stays."""
        # not a `with`: it would wait for ever for a thread that hangs. The interpreter's end waits for them, though.
        pool = ThreadPoolExecutor(len(tasks), thread_name_prefix="shard")
        futures = [pool.submit(contextvars.copy_context().run, self._collect, shard, task) for shard, task in tasks]
        pool.shutdown(wait=False)
        try:
            while (left := wait(futures, LOOK_SECONDS, FIRST_EXCEPTION).not_done) and not any(map(_error, futures)):
                self._report_progress()
            if not left:
                self._report_progress()
                return [future.result() for future in futures]
        finally:
            self._stopped.set()
            self._until_ended(futures)
        errors = [error for future in futures if (error := _error(future)) is not None]
        # Not that of a worker that was ended, and rather one that repeating cannot help.
        raise min(errors, key=lambda error: (isinstance(error, Stopped), isinstance(error, InfraError)))

    def _collect(self, shard: Shard, task: Program) -> ShardOutcome:
        """Have one worker after another work on a shard, until it is whole or may not be tried again."""
        while True:
            try:
                outcome = self._sharded.work(self._launcher, shard, task, self._stopped, self._finished)
                self._finished[shard.label] = len(outcome.rollouts)  # what it said last may not have been heard
                return outcome
            except InfraError as error:
                if not self._sharded.may_repeat(task, error, self._stopped):
                    raise

    def _report_progress(self) -> None:
        finished = sum(list(self._finished.values()))
        if self._progress is not None and finished != self._reported:
            self._reported = finished
            self._progress(self._before + finished, self._planned)

    def _until_ended(self, futures: Sequence[Future[ShardOutcome]]) -> None:
        """Wait for the workers to end, so that no Job or process outlives the stage. To interrupt it again changes nothing."""
        deadline = time.monotonic() + self._launcher.ending_seconds
        while time.monotonic() < deadline:
            try:
                if not wait(futures, LOOK_SECONDS).not_done:
                    return
            except Interrupted:
                continue
        log.error("%d workers have not ended in time.", sum(not future.done() for future in futures))


def _error(future: Future[ShardOutcome]) -> BaseException | None:
    return future.exception() if future.done() else None


def open_collector(run: Run, stage: Stage, policy_version: int) -> InProcessCollector | ShardedCollector:
    """A new attempt at a stage, by the collector that `rollout.distribution` names."""
    if isinstance(run.config.rollout.distribution, InProcessCollection):
        return InProcessCollector(run.config, Parts(run.begin(stage, policy_version=policy_version), policy_version))
    return ShardedCollector(run, stage, policy_version)
