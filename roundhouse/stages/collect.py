"""Collect: rollouts of one policy version, written down while they finish.

Invariants: each planned rollout is in the committed dataset exactly once; rollouts that an interrupted attempt had written
are kept, and only the missing ones are generated again, under the same seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from roundhouse.config.models import RolloutConfig, RunConfig, Sampling
from roundhouse.errors import TooFewRollouts
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.gym.collector import RolloutSpec, collect, plan_rollouts
from roundhouse.gym.environment import TaskRow
from roundhouse.gym.sessions import open_environment
from roundhouse.gym.task_sampler import sample_tasks
from roundhouse.health.watchdog import run_interruptible
from roundhouse.stages.datasets import Draw, dataset_stage
from roundhouse.stages.metrics import rollout_metrics
from roundhouse.stages.rounds import sample_rounds
from roundhouse.store.location import Location
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import Attempt, Stage, read_part, read_table
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import ROLLOUTS, TURNS, rollouts_from_tables, rollouts_table, turns_table

FLUSH_SECONDS = 5.0
"""Finished rollouts wait at most this long in memory: what a crash can cost."""

Progress = Callable[[int, int], None]
"""Called with (finished, planned)."""


@dataclass(frozen=True)
class Collected:
    """All planned rollouts, in the plan's order."""

    rollouts: list[Rollout]
    window_seconds: float
    """Wall time in which rollouts ran: engine, environment and agent loop together."""

    def metrics(self) -> dict[str, float]:
        generated = sum(len(turn.generation_token_ids) for rollout in self.rollouts for turn in rollout.turns)
        rates = {"rollout/tokens_per_second": generated / self.window_seconds} if self.window_seconds > 0 else {}
        return rollout_metrics(self.rollouts) | {"seconds/rollouts": self.window_seconds} | rates


def collect_iteration(
    run: Run, iteration: int, weights: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect the training rollouts of an iteration with the policy version that `weights` refitted the engine to."""
    config = run.config
    stage = run.stage(iteration, "collect")
    if (done := stage.reference()) is not None:
        return done
    tasks = open_environment(config.environment).tasks("train")
    attempt = run.begin(stage, policy_version=weights.policy_version)
    if config.rollout.dynamic_sampling is not None:
        return _collect_rounds(stage, attempt, tasks, config, weights, engine_url, progress)
    rows = sample_tasks(tasks, config.seed, iteration, config.rollout.tasks)
    specs = plan_rollouts(rows, config.rollout.group_size, config.seed, iteration)
    return _collect_and_commit(stage, attempt, specs, config, weights, engine_url, progress)


def collect_dataset(
    run: Run, name: str, draw: Draw, checkpoint: Reference, engine_url: str, progress: Progress | None = None
) -> Reference:
    """Collect rollouts of a checkpoint into `datasets/<name>/`, outside any training iteration. The same again is a no-op."""
    config, iteration = run.config, draw.iteration
    stage = dataset_stage(run, name, draw.label(checkpoint.policy_version), draw)
    if (done := stage.reference()) is not None:
        return done
    rows = sample_tasks(
        open_environment(config.environment).tasks("train"), config.seed, iteration, config.rollout.tasks
    )
    specs = plan_rollouts(rows, config.rollout.group_size, config.seed, iteration)
    attempt = run.begin(stage, policy_version=checkpoint.policy_version)
    return _collect_and_commit(stage, attempt, specs, config, checkpoint, engine_url, progress)


def _collect_and_commit(
    stage: Stage,
    attempt: Attempt,
    specs: Sequence[RolloutSpec],
    config: RunConfig,
    weights: Reference,
    engine_url: str,
    progress: Progress | None,
) -> Reference:
    collected = collect_into(
        stage,
        attempt,
        specs,
        config,
        sampling=config.generation.sampling,
        engine_url=engine_url,
        progress=progress,
        policy_version=weights.policy_version,
    )
    _refuse_many_failures(collected.rollouts, config.rollout, engine_url)
    ledger = Ledger.from_rollouts(collected.rollouts, requested=len(specs))
    return attempt.commit(
        inputs={"weights": weights},
        counts=ledger.counts(),
        metrics=collected.metrics(),
        details={"failures": ledger.failures},
    )


def _collect_rounds(
    stage: Stage,
    attempt: Attempt,
    tasks: Sequence[TaskRow],
    config: RunConfig,
    weights: Reference,
    engine_url: str,
    progress: Progress | None,
) -> Reference:
    """Collect round after round (`roundhouse.stages.rounds`) into one stage."""
    planned, seconds = 0, 0.0

    def roll_out(specs: list[RolloutSpec]) -> list[Rollout]:
        nonlocal planned, seconds
        before = planned
        planned += len(specs)

        def on_progress(finished: int, _: int) -> None:
            if progress is not None:
                progress(before + finished, planned)

        collected = collect_into(
            stage,
            attempt,
            specs,
            config,
            sampling=config.generation.sampling,
            engine_url=engine_url,
            progress=on_progress,
            policy_version=weights.policy_version,
        )
        _refuse_many_failures(collected.rollouts, config.rollout, engine_url)
        seconds += collected.window_seconds
        return collected.rollouts

    assert stage.iteration is not None, "a collect stage belongs to an iteration"
    sampled = sample_rounds(tasks, config.rollout, config.seed, stage.iteration, roll_out)
    ledger = Ledger.from_rollouts(sampled.rollouts, requested=planned)
    return attempt.commit(
        inputs={"weights": weights},
        counts=ledger.counts(),
        metrics=Collected(sampled.rollouts, seconds).metrics() | sampled.metrics(),
        details={"failures": ledger.failures, "dynamic_sampling": sampled.details()},
    )


def collect_into(
    stage: Stage,
    attempt: Attempt,
    specs: Sequence[RolloutSpec],
    config: RunConfig,
    *,
    sampling: Sampling,
    engine_url: str,
    progress: Progress | None = None,
    on_policy: bool = True,
    policy_version: int | None = None,
) -> Collected:
    """Collect what is missing of `specs` and write everything as `rollouts` and `turns` of the attempt; see
    `gym.collector.collect` for the last two."""
    kept = _finished_earlier(stage, specs)
    missing = [spec for spec in specs if spec.rollout_id not in kept]
    writer = _Writer(attempt)
    writer.add_all(kept.values())
    finished = len(kept)

    def on_rollout(rollout: Rollout) -> None:
        nonlocal finished
        finished += 1
        writer.add(rollout)
        if progress is not None:
            progress(finished, len(specs))

    async def work() -> list[Rollout]:
        environment = open_environment(config.environment)
        async with HttpPolicyClient(engine_url, config.generation) as policy, environment:
            return await collect(
                missing,
                policy,
                environment,
                config.rollout,
                sampling,
                on_rollout,
                on_policy=on_policy,
                policy_version=policy_version,
            )

    started = time.monotonic()
    fresh = {rollout.rollout_id: rollout for rollout in run_interruptible(work())}
    window = time.monotonic() - started
    writer.flush()
    rollouts = [kept[spec.rollout_id] if spec.rollout_id in kept else fresh[spec.rollout_id] for spec in specs]
    return Collected(rollouts, window)


def read_rollouts(reference: Reference) -> list[Rollout]:
    """The rollouts of a complete collect or evaluate stage."""
    return rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))


class _Writer:
    """Writes finished rollouts as parts: `turns` before `rollouts`, so that a rollout on disk has its turns."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._waiting: list[Rollout] = []
        self._flushed_at = time.monotonic()

    def add_all(self, rollouts: Iterable[Rollout]) -> None:
        self._waiting.extend(rollouts)

    def add(self, rollout: Rollout) -> None:
        self._waiting.append(rollout)
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._attempt.write_table("turns", turns_table(self._waiting))
            self._attempt.write_table("rollouts", rollouts_table(self._waiting))
        self._waiting = []
        self._flushed_at = time.monotonic()


def _finished_earlier(stage: Stage, specs: Sequence[RolloutSpec]) -> dict[str, Rollout]:
    """Rollouts that earlier, interrupted attempts finished, by id. Failed ones are tried again, and so are those whose part is
    damaged, or is not listed (yet): the same seeds make them anew."""
    wanted = {spec.rollout_id for spec in specs}
    names = set(stage.location.names())
    found: dict[str, Rollout] = {}
    for name in sorted(name for name in names if name.startswith("rollouts-") and name.endswith(".parquet")):
        for rollout in _rollouts_in(stage.location, name):
            if rollout.rollout_id in wanted and rollout.status is not Status.FAILED:
                found[rollout.rollout_id] = rollout
    return found


def _rollouts_in(location: Location, name: str) -> list[Rollout]:
    """The rollouts of a part and its turns; none when either cannot be trusted."""
    rollouts = read_part(location, name, ROLLOUTS)
    turns = read_part(location, "turns-" + name.removeprefix("rollouts-"), TURNS)
    return [] if rollouts is None or turns is None else rollouts_from_tables(rollouts, turns)


def _refuse_many_failures(rollouts: Sequence[Rollout], config: RolloutConfig, engine_url: str) -> None:
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    if len(failed) <= config.max_failed_fraction * len(rollouts):
        return
    first = failed[0]
    raise TooFewRollouts(
        f"{len(failed)} of {len(rollouts)} rollouts failed, more than rollout.max_failed_fraction="
        f"{config.max_failed_fraction} allows. The first: {first.failure_code}: {first.failure_detail} (engine: {engine_url}). "
        "What finished is kept; the next attempt generates only the rest."
    )
