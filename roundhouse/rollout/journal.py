"""The journal of a collection: finished model calls of unfinished rollouts, so that an interruption does not cost them.

Invariants: what is handed out for a rollout are its calls from the first on, without a gap, made under its seed by the policy
version that is being collected; where there is something on record that cannot be used, the reason is counted. Memory holds the
calls of rollouts in flight (their agents hold the same tokens) and those not taken to the store yet; a finished rollout leaves
nothing behind.

    journal = TurnJournal(policy_version=3)
    journal.read(part) …                 what earlier, interrupted attempts had written, in order
    calls = journal.recorded(spec, "replay")   for each attempt at a rollout; it records into the journal
    part = journal.take()                what to write down now, or None
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container
from typing import Any

import pyarrow as pa

from roundhouse.environments.base import Restoration
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.replay import RecordedCall, RecordedCalls, Resumption, journal_events, journal_table
from roundhouse.trajectories.records import FailureKind, Rollout

log = logging.getLogger(__name__)


class TurnJournal:
    """Of one stage; see the module's docstring."""

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
    """How rollouts with calls on record went on, over all attempts at a stage."""

    def __init__(self) -> None:
        self.rollouts_resumed = 0
        """Times that a rollout went on behind its recorded calls."""
        self.turns_resumed = 0
        """Model calls that were not made again."""
        self.rollouts_restarted: Counter[str] = Counter()
        """Times that a rollout began anew all the same, by reason."""

    def count(self, event: Resumption) -> None:
        if event.reason:
            self.rollouts_restarted[event.reason] += 1
        else:
            self.rollouts_resumed += 1
            self.turns_resumed += event.calls

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/resumed": float(self.rollouts_resumed),
            "rollout/turns_resumed": float(self.turns_resumed),
            "rollout/restarted": float(self.rollouts_restarted.total()),
        }

    def details(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            "rollouts_resumed": self.rollouts_resumed,
            "turns_resumed": self.turns_resumed,
            "rollouts_restarted": dict(sorted(self.rollouts_restarted.items())),
        }


def _complete(call: RecordedCall) -> bool:
    return call.message is None or call.turn is not None
