"""Finished model calls of unfinished rollouts, and how they stand in a journal.

Invariant: what is read is what was written, to the last bit of a log-probability; storage is linear in tokens, since a row
holds only what its prompt adds. A row is a call, or says how a rollout went on: `resumed` after so many calls that were not
made again, `restarted` from its first call, and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from roundhouse.generation.protocol import Completion
from roundhouse.trajectories.records import Turn
from roundhouse.trajectories.schemas import TURNS

CALL, RESUMED, RESTARTED = "call", "resumed", "restarted"

_TURN_FIELDS = [name for name in TURNS.names if name not in ("rollout_id", "turn", "trained")]

JOURNAL = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("event", pa.string()),  # call, resumed or restarted
        ("number", pa.int32()),  # of a call: 0, 1, …; else how many calls were on record
        ("reason", pa.string()),  # of a restart
        ("seed", pa.int64()),  # the rollout's
        ("request", pa.string()),  # digest of what was asked
        ("message", pa.string()),  # JSON: the reply; null where the environment cannot be restored
        ("answers", pa.string()),  # JSON: what the environment had answered since the call before
        ("snapshot", pa.string()),  # JSON: the session at this call; only of a part's newest call
        *(TURNS.field(name) for name in _TURN_FIELDS if name != "generation_log_probs"),
        ("generation_log_probs", pa.list_(pa.float64())),  # as the engine said them
    ]
)
"""One row an event; null where a column says nothing about it."""


@dataclass(slots=True)
class RecordedCall:
    """A finished model call, and what the environment had answered since the call before it."""

    rollout_id: str
    seed: int
    """The rollout's."""
    number: int
    """0, 1, … in the order of the calls."""
    turns: Sequence[Turn]
    """Where its turn is, or will be: the agent of a live rollout makes it right after the reply."""
    place: int
    """Its index there."""
    request: str = ""
    """Digest of what was asked."""
    message: dict[str, Any] | None = None
    """The reply. None: the environment cannot be restored, so only the fact is noted."""
    answers: list[dict[str, Any] | None] = field(default_factory=list)
    snapshot: str | None = None
    """JSON: the session as it was when this call was made."""

    @property
    def turn(self) -> Turn | None:
        return self.turns[self.place] if self.place < len(self.turns) else None

    def completion(self, before: list[int]) -> Completion:
        """The reply as the engine gave it; `before` is prompt and generation of the call before it."""
        assert self.turn is not None, "only finished calls are played back"
        assert self.message is not None, "only calls of environments that can be restored are played back"
        added = self.turn.prompt_token_ids
        return Completion(
            message=self.message,
            finish_reason=self.turn.finish_reason,
            prompt_token_ids=added if self.turn.parent is None else before + added,
            generation_token_ids=self.turn.generation_token_ids,
            generation_log_probs=self.turn.generation_log_probs,
            policy_version=self.turn.policy_version,
            latency_seconds=self.turn.latency_seconds,
            version_spans=self.turn.version_spans,
        )


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a rollout of which calls were on record went on."""

    rollout_id: str
    calls: int
    reason: str = ""
    """Why it was started afresh; empty when it was resumed."""


class Recorder(Protocol):
    """Keeps the calls of a collection's rollouts, and how each of them resumed."""

    def record(self, call: RecordedCall) -> None:
        """A call was finished."""
        ...

    def went_on(self, event: Resumption) -> None:
        """A rollout was resumed, or restarted."""
        ...


def journal_table(events: Iterable[RecordedCall | Resumption]) -> pa.Table:
    """The rows of a journal's part."""
    rows = [_call_row(event) if isinstance(event, RecordedCall) else _event_row(event) for event in events]
    return pa.Table.from_pylist(rows, schema=JOURNAL)


def journal_events(table: pa.Table) -> Iterator[RecordedCall | Resumption]:
    """What a part tells, in its order."""
    for row in table.to_pylist():
        if row["event"] != CALL:
            yield Resumption(row["rollout_id"], row["number"], row["reason"])
            continue
        call = RecordedCall(row["rollout_id"], row["seed"], row["number"], (), 0)
        if row["message"] is not None:
            call.turns = [Turn(turn=row["number"], **{name: row[name] for name in _TURN_FIELDS})]
            call.request, call.snapshot = row["request"], row["snapshot"]
            call.message, call.answers = json.loads(row["message"]), json.loads(row["answers"])
        yield call


def _call_row(call: RecordedCall) -> dict[str, Any]:
    row: dict[str, Any] = {
        "rollout_id": call.rollout_id,
        "event": CALL,
        "number": call.number,
        "seed": call.seed,
    }
    if call.message is None:
        return row
    turn = call.turn
    return row | {
        "request": call.request,
        "message": json.dumps(call.message),
        "answers": json.dumps(call.answers, default=repr),
        "snapshot": call.snapshot,
        **{name: getattr(turn, name) for name in _TURN_FIELDS},
    }


def _event_row(event: Resumption) -> dict[str, Any]:
    return {
        "rollout_id": event.rollout_id,
        "event": RESTARTED if event.reason else RESUMED,
        "number": event.calls,
        "reason": event.reason,
    }
