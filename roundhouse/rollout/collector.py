"""The rollout engine: many rollouts at once, each handled when it completes, all returned in the plan's order.

Invariants: every spec yields exactly one rollout; no more than `config.concurrency` are in flight and no work exists for those
not yet begun; only infrastructure failures are tried again, a bounded number of times; when `collect` returns, raises or is
cancelled, no task of its own is left running.

It stops asking an engine or environment that is gone: an `Outage` opens only when `threshold` rollouts in a row, each after all
its attempts, failed for infrastructure. Any other outcome in between shows that something still works and starts the
count anew. Once open, it stays open. Without it a collection of 10,000 rollouts would try each of them three times against a
dead engine. A `RetryBudget` bounds the retries where not everything fails: where one rollout in three does, three attempts each
would hide it and cost a half more.

The journal holds the finished model calls of unfinished rollouts, so that an interruption does not cost them. What it hands out
for a rollout are its calls from the first on, without a gap, made under its seed by the policy version that is being collected;
where there is something on record that cannot be used, the reason is counted. Memory holds the calls of rollouts in flight
(their agents hold the same tokens) and those not taken to the store yet; a finished rollout leaves nothing behind.

    journal = TurnJournal(policy_version=3)
    journal.read(part) …                 what earlier, interrupted attempts had written, in order
    calls = journal.recorded(spec, "replay")   for each attempt at a rollout; it records into the journal
    part = journal.take()                what to write down now, or None
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import RetryPolicy, RolloutConfig, Sampling
from roundhouse.environments.base import Restoration
from roundhouse.generation.protocol import PolicyClient
from roundhouse.retry import Backoff
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.plan import RolloutSpec, reorder
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.rollout.recording import run_branch
from roundhouse.rollout.replay import RecordedCall, RecordedCalls, Resumption, journal_events, journal_table
from roundhouse.trajectories.records import FailureKind, Rollout, Status, derive_seed

log = logging.getLogger(__name__)

OnRollout = Callable[[Rollout], None]
"""Called in the event loop for each final rollout as it completes: the others wait for their engine meanwhile."""


async def collect(
    specs: Sequence[RolloutSpec],
    policy: PolicyClient,
    environment: EnvironmentClient,
    config: RolloutConfig,
    sampling: Sampling,
    on_rollout: OnRollout | None = None,
    *,
    on_policy: bool = True,
    policy_version: int | None = None,
    journal: TurnJournal | None = None,
) -> list[Rollout]:
    """Make all rollouts of `specs`; the result is in their order.

    Args:
        on_policy: they are to be trained on; a row that asks for another sampling than `sampling` then fails.
        policy_version: version that the engine holds, for agents whose answers do not have it.
        journal: model calls that were finished before, and where those of each attempt are recorded; also an attempt that
            follows on an infrastructure failure here resumes after them. Without one, each attempt starts from its first call.

    Failures are outcomes and do not raise; what `on_rollout` raises does, and ends the collection.
    """
    given = RolloutCollection.of(
        specs,
        policy,
        environment,
        config,
        sampling,
        on_policy=on_policy,
        policy_version=policy_version,
        journal=journal,
    )
    return await given.run(on_rollout)


async def _run(spec: RolloutSpec, *arguments: Any, **options: Any) -> Rollout:
    return await (run_rollout if spec.branch is None else run_branch)(spec, *arguments, **options)


def retry_delay(retry: RetryPolicy, attempt: int, seed: int) -> float:
    """Seconds to wait after failed attempt `attempt` (1, 2, …): exponential, the upper half of it at random by `seed`,
    so that rollouts which failed together do not come back together."""
    pause = Backoff(retry.first_delay_seconds, retry.max_delay_seconds, retry.factor).pause(attempt)
    return pause * (0.5 + derive_seed(seed, "retry", attempt) / 2**32)


class RolloutCollection:
    """Rollouts that are made together: what one failure says about the others. `run` makes all of them with workers that take
    specs from a shared iterator; a caller with an order of its own makes one after another with `roll_out`."""

    @classmethod
    def of(
        cls,
        specs: Sequence[RolloutSpec],
        policy: PolicyClient,
        environment: EnvironmentClient,
        config: RolloutConfig,
        sampling: Sampling,
        *,
        on_policy: bool = True,
        policy_version: int | None = None,
        journal: TurnJournal | None = None,
    ) -> RolloutCollection:
        """Arguments as of `collect`."""
        play = partial(
            _run,
            policy=policy,
            environment=environment,
            config=config,
            sampling=sampling,
            on_policy=on_policy,
            policy_version=policy_version,
        )
        recorded = None if journal is None else partial(journal.recorded, restoration=environment.restoration)
        return cls(specs, play, environment.name, config, recorded)

    def __init__(
        self,
        specs: Sequence[RolloutSpec],
        play: Callable[..., Awaitable[Rollout]],
        environment_name: str,
        config: RolloutConfig,
        recorded: Callable[[RolloutSpec], RecordedCalls] | None,
    ) -> None:
        self._specs = specs
        self._play = play
        self._environment_name = environment_name
        self._config = config
        self._recorded = recorded
        self._queue: Iterator[tuple[int, RolloutSpec]] = iter(enumerate(specs))
        self._workers = min(config.concurrency or len(specs), len(specs))
        self._outage = Outage(self._workers)
        self._budget = RetryBudget(len(specs), config.retry.budget_fraction, config.retry.budget_seconds)
        self._results: list[tuple[int, Rollout]] = []

    async def run(self, on_rollout: OnRollout | None = None) -> list[Rollout]:
        """All of them, in the order of the specs."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._work(on_rollout))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return reorder(self._results, len(self._specs))

    async def roll_out(self, spec: RolloutSpec, **given: Any) -> Rollout:
        """One of them, to its outcome; `given` overrides what `collect` has for all."""
        with ACTIVITY.track("collect", "rollout", spec.rollout_id):
            rollout = self._not_tried(spec) if self._outage.open else await self._try(spec, given)
        if rollout.status is Status.FAILED:
            log.info("%s failed: %s: %s", rollout.rollout_id, rollout.failure_code, rollout.failure_detail)
        was_open = self._outage.open
        self._outage.record(rollout)
        if self._outage.open and not was_open:
            log.warning(
                "The last %d rollouts all failed for infrastructure (%s: %s); those not begun yet are not tried.",
                self._outage.threshold,
                rollout.failure_code,
                rollout.failure_detail,
            )
        return rollout

    async def _work(self, on_rollout: OnRollout | None) -> None:
        for index, spec in self._queue:
            rollout = await self.roll_out(spec)
            self._results.append((index, rollout))
            if on_rollout is not None:
                on_rollout(rollout)

    async def _try(self, spec: RolloutSpec, given: Mapping[str, Any]) -> Rollout:
        """Attempts until one is not an infrastructure failure, or none is left."""
        retry = self._config.retry
        attempt = 1
        while True:
            recorded = None if self._recorded is None else self._recorded(spec)
            rollout = await self._play(spec, attempt=attempt, recorded=recorded, **given)
            if rollout.failure_kind is not FailureKind.INFRA or attempt >= retry.attempts or self._outage.open:
                return rollout
            if not self._budget.take(time.monotonic()):
                log.info("%s: %s, and the budget of retries is spent", rollout.rollout_id, rollout.failure_code)
                return rollout
            delay = retry_delay(retry, attempt, spec.seed)
            log.info("%s: %s, attempt %d; again in %.1f s", rollout.rollout_id, rollout.failure_code, attempt, delay)
            await asyncio.sleep(delay)
            attempt += 1

    def _not_tried(self, spec: RolloutSpec) -> Rollout:
        last = self._outage.last
        assert last is not None
        return Rollout(
            group_id=spec.group_id,
            sample=spec.sample,
            task=spec.row,
            environment=self._environment_name,
            status=Status.FAILED,
            attempt=0,
            seed=spec.seed,
            failure_kind=FailureKind.INFRA,
            failure_code=last.failure_code,
            failure_detail=f"Not tried: {self._outage.threshold} rollouts before it failed in a row. {last.failure_detail}",
        )


SMALLEST_THRESHOLD = 4
"""A few rollouts fail alone for reasons of their own, even when they run one at a time."""


class Outage:
    """Watches the finished rollouts of one collection with `workers` in flight."""

    def __init__(self, workers: int) -> None:
        # One whole wave: with all in flight at once, a shorter row may be a single hiccup that hit them together.
        self.threshold = max(workers, SMALLEST_THRESHOLD)
        self._in_a_row = 0
        self.last: Rollout | None = None
        """The failure that opened it."""

    @property
    def open(self) -> bool:
        return self.last is not None

    def record(self, rollout: Rollout) -> None:
        """Take note of a finished rollout."""
        infra = rollout.status is Status.FAILED and rollout.failure_kind is FailureKind.INFRA
        self._in_a_row = self._in_a_row + 1 if infra else 0
        if self._in_a_row >= self.threshold and self.last is None:
            self.last = rollout


class RetryBudget:
    """The retries of one collection: at most `fraction` of its rollouts, and none later than `seconds` after the first."""

    def __init__(self, rollouts: int, fraction: float | None, seconds: float | None) -> None:
        self._left = math.inf if fraction is None else math.ceil(rollouts * fraction)
        self._seconds = seconds
        self._first_at: float | None = None

    def take(self, now: float) -> bool:
        """Whether there may be one more retry at this time, in seconds of any clock that does not run backwards."""
        first_at = now if self._first_at is None else self._first_at
        if self._left < 1 or (self._seconds is not None and now - first_at > self._seconds):
            return False
        self._first_at, self._left = first_at, self._left - 1
        return True


class TurnJournal:
    """Of one stage."""

    def __init__(self, policy_version: int | None = None, oldest_version: int | None = None) -> None:
        """`policy_version`: calls that another one answered are not used, but for those from `oldest_version` on where older
        ones are allowed; None takes any."""
        self._oldest_version = policy_version if oldest_version is None else oldest_version
        self.resumptions = ResumptionCounts()
        self._policy_version = policy_version
        self._calls: dict[str, list[RecordedCall]] = {}
        """Of unfinished rollouts."""
        self._gaps: set[str] = set()
        """Rollouts of which earlier calls are lost: their part is damaged, or not listed yet."""
        self._waiting: dict[str, list[RecordedCall]] = {}
        self._events: list[Resumption] = []

    def read(self, part: pa.Table, leave_out: Container[str] = ()) -> None:
        """Take up a part of an earlier attempt; later parts know better.

        Args:
            leave_out: rollouts whose calls are of no use any more.
        """
        for event in journal_events(part):
            if isinstance(event, RecordedCall):
                if event.rollout_id not in leave_out:
                    self._keep(event)
            else:
                self.resumptions.count(event)
                if event.reason:
                    self._forget(event.rollout_id)

    def recorded(self, spec: RolloutSpec, restoration: Restoration) -> RecordedCalls:
        """For the next attempt at a rollout, in an environment that can be restored in this way."""
        calls = self._calls.get(spec.rollout_id, [])
        reason = ""  # why the recorded calls cannot be used
        if spec.rollout_id in self._gaps:
            reason = "incomplete_journal"
        elif any(call.seed != spec.seed for call in calls):
            reason = "other_seed"
        elif calls and (restoration == "none" or any(call.message is None for call in calls)):
            reason = "not_restorable"
        elif any(not self._is_of_the_policy(call) for call in calls):
            reason = "other_policy_version"
        elif calls and restoration == "snapshot" and calls[-1].snapshot is None:
            reason = "no_snapshot"
        if reason:
            self.went_on(Resumption(spec.rollout_id, len(calls), reason))
            calls = []
        return RecordedCalls(self, restoration, tuple(calls))

    def finished(self, rollout: Rollout) -> None:
        """A rollout has its outcome. Of one that failed for infrastructure the calls stay: another attempt can use them."""
        self._forget(rollout.rollout_id)
        if rollout.failure_kind is not FailureKind.INFRA:
            self._waiting.pop(rollout.rollout_id, None)

    def take(self) -> pa.Table | None:
        """What was not taken before."""
        ready = [call for calls in self._waiting.values() for call in calls if _complete(call)]
        events: list[RecordedCall | Resumption] = [*self._events, *ready]
        if not events:
            return None
        unready = [call for calls in self._waiting.values() for call in calls if not _complete(call)]
        self._waiting, self._events = {}, []
        for call in unready:
            self._waiting.setdefault(call.rollout_id, []).append(call)
        return journal_table(events)

    # -- from `RecordedCalls` --------------------------------------------------------------------------------------------

    def record(self, call: RecordedCall) -> None:
        self._keep(call)
        waiting = self._waiting.setdefault(call.rollout_id, [])
        if waiting:
            waiting[-1].snapshot = None
        waiting.append(call)

    def went_on(self, event: Resumption) -> None:
        if event.reason:
            lost = sum(call.generated_tokens for call in self._calls.get(event.rollout_id, ()))
            event = replace(event, lost_tokens=lost)
        self.resumptions.count(event)
        self._events.append(event)
        if event.reason:
            self._forget(event.rollout_id)
            self._waiting.pop(event.rollout_id, None)
            log.info("%s starts afresh, %d of its calls are lost: %s", event.rollout_id, event.calls, event.reason)

    # ---------------------------------------------------------------------------------------------------------------

    def _keep(self, call: RecordedCall) -> None:
        calls = self._calls.setdefault(call.rollout_id, [])
        if call.number > len(calls):
            self._gaps.add(call.rollout_id)
            return
        del calls[call.number :]
        if call.number == 0:
            self._gaps.discard(call.rollout_id)
        elif calls:
            calls[-1].snapshot = None  # only the newest is ever restored
        calls.append(call)

    def _forget(self, rollout_id: str) -> None:
        self._calls.pop(rollout_id, None)
        self._gaps.discard(rollout_id)

    def _is_of_the_policy(self, call: RecordedCall) -> bool:
        if self._policy_version is None or self._oldest_version is None:
            return True
        return call.turn is not None and self._oldest_version <= call.turn.policy_version <= self._policy_version


class ResumptionCounts:
    """How rollouts with recorded calls were resumed, over all attempts at a stage."""

    def __init__(self) -> None:
        self.rollouts_resumed = 0
        """Times that a rollout resumed after its recorded calls."""
        self.turns_resumed = 0
        """Model calls that were not made again."""
        self.rollouts_restarted: Counter[str] = Counter()
        """Times that a rollout began anew all the same, by reason."""
        self.lost_tokens = 0
        """What the recorded calls of these had generated."""

    def count(self, event: Resumption) -> None:
        if event.reason:
            self.rollouts_restarted[event.reason] += 1
            self.lost_tokens += event.lost_tokens
        else:
            self.rollouts_resumed += 1
            self.turns_resumed += event.calls

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/resumed": float(self.rollouts_resumed),
            "rollout/turns_resumed": float(self.turns_resumed),
            "rollout/restarted": float(self.rollouts_restarted.total()),
            "rollout/repeated_tokens": float(self.lost_tokens),
        }

    def details(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            "rollouts_resumed": self.rollouts_resumed,
            "turns_resumed": self.turns_resumed,
            "rollouts_restarted": dict(sorted(self.rollouts_restarted.items())),
            "lost_tokens": self.lost_tokens,
        }


def _complete(call: RecordedCall) -> bool:
    return call.message is None or call.turn is not None
