"""Replay the finished model calls of an interrupted attempt, record new ones, and store them in a journal.

Wrappers around policy and environment make recorded answers indistinguishable from live ones for the agent.

Invariants: a recorded reply answers only its original request (messages, tools, sampling and seed, by digest) with its
original prompt tokens (by digest), and only if the environment's answers were equal. On any difference `divergence` has
the reason, the attempt is void and the rollout restarts. After the last recorded call, engine and environment are
called live with the same seeds.

    recorded before                  call 0 ── tool ── call 1
    resumed, environment replays     call 0    TOOL    call 1 ── TOOL ── CALL 2 …       CAPITALS: really called
    resumed, from a snapshot         call 0    tool    call 1 ── TOOL ── CALL 2 …

Environment answers after the newest finished call are not recorded; they are requested again.

A journal row is a call, or an event: `resumed` (after how many replayed calls) or `restarted` (with the reason).
Reading returns the written values to the last bit. A row stores only the tokens that its prompt adds, so storage is
linear in tokens. For a rollout, the journal returns its calls from the first one without a gap, of its seed and of the
collected policy version; unusable records are counted by reason. Memory holds calls of rollouts in flight and calls not
yet stored; finished rollouts are removed.

    journal = TurnJournal(policy_version=3)
    journal.read(part) …                       parts of earlier attempts, in order
    calls = journal.recorded(spec, "replay")   for each attempt at a rollout; it records into the journal
    part = journal.take()                      rows to store now, or None
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import orjson
import pyarrow as pa

from roundhouse.config.models import Sampling
from roundhouse.environments.base import GymStep, Restoration, TaskRow, ToolResult
from roundhouse.errors import DataError
from roundhouse.generation.protocol import TOKEN_FIELDS, Completion, PolicyClient
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import (
    EnvironmentClient,
    EnvironmentSession,
    EpisodeEnvironment,
    EpisodeSession,
    Restorable,
    SnapshotFailed,
    Snapshotting,
    ToolEnvironment,
)
from roundhouse.trajectories.records import FailureKind, Rollout, Turn, digest_tokens
from roundhouse.trajectories.schemas import TURNS

log = logging.getLogger(__name__)

CALL, RESUMED, RESTARTED = "call", "resumed", "restarted"

_TURN_FIELDS = [name for name in TURNS.names if name not in ("rollout_id", "turn", "trained")]

JOURNAL = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("event", pa.string()),  # call, resumed or restarted
        ("number", pa.int32()),  # of a call: 0, 1, …; else how many calls were on record
        ("reason", pa.string()),  # of a restart
        ("seed", pa.int64()),  # the rollout's
        ("request", pa.string()),  # digest of the request
        ("message", pa.string()),  # JSON: the reply; null if the environment cannot be restored
        ("answers", pa.string()),  # JSON: the environment's answers since the previous call
        ("snapshot", pa.string()),  # JSON: the session at this call; only of a part's newest call
        # of a call; of a restart: of all calls that are lost
        pa.field("generated_tokens", pa.int64(), metadata={"added_later": "null in parts of earlier versions"}),
        *(TURNS.field(name) for name in _TURN_FIELDS if name != "generation_log_probs"),
        ("generation_log_probs", pa.list_(pa.float64())),  # as reported by the engine
    ]
)
"""One row per event; columns that do not apply are null."""


@dataclass(slots=True)
class RecordedCall:
    """A finished model call, with the environment's answers since the previous call."""

    rollout_id: str
    seed: int
    """The rollout's."""
    number: int
    """0, 1, … in the order of the calls."""
    turns: Sequence[Turn]
    """List that holds its turn; in a live rollout the agent appends the turn right after the reply."""
    place: int
    """Its index there."""
    request: str = ""
    """Digest of the request."""
    message: dict[str, Any] | None = None
    """The reply. None: the environment cannot be restored, so only the fact is noted."""
    answers: list[dict[str, Any] | None] = field(default_factory=list)
    snapshot: str | None = None
    """JSON: the session as it was when this call was made."""
    generated_tokens: int = 0
    """Number of tokens of the reply, recorded even without the message."""

    @property
    def turn(self) -> Turn | None:
        return self.turns[self.place] if self.place < len(self.turns) else None

    @property
    def finished_turn(self) -> Turn:
        """Return the turn of a replayed call."""
        assert self.turn is not None, "only finished calls are played back"
        return self.turn

    def completion(self, prompt: list[int]) -> Completion:
        """Return the engine's reply to `prompt`, the tokens of all calls that it continues."""
        assert self.message is not None, "only calls of environments that can be restored are played back"
        turn = self.finished_turn
        return Completion(
            message=self.message,
            finish_reason=turn.finish_reason,
            prompt_token_ids=prompt,
            generation_token_ids=turn.generation_token_ids,
            generation_log_probs=turn.generation_log_probs,
            policy_version=turn.policy_version,
            latency_seconds=turn.latency_seconds,
            version_spans=turn.version_spans,
        )


@dataclass(frozen=True, slots=True)
class Resumption:
    """Resumption or restart of a rollout with recorded calls."""

    rollout_id: str
    calls: int
    reason: str = ""
    """Why it was started afresh; empty when it was resumed."""
    lost_tokens: int = 0
    """Generated tokens of the discarded calls of a restarted rollout."""


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
    rows = [
        _call_row(event)
        if isinstance(event, RecordedCall)
        else {
            "rollout_id": event.rollout_id,
            "event": RESTARTED if event.reason else RESUMED,
            "number": event.calls,
            "reason": event.reason,
            "generated_tokens": event.lost_tokens,
        }
        for event in events
    ]
    return pa.Table.from_pylist(rows, schema=JOURNAL)


def journal_events(table: pa.Table) -> Iterator[RecordedCall | Resumption]:
    """The events of a part, in their order."""
    for row in table.to_pylist():
        if row["event"] != CALL:
            yield Resumption(row["rollout_id"], row["number"], row["reason"], row["generated_tokens"] or 0)
            continue
        call = RecordedCall(row["rollout_id"], row["seed"], row["number"], (), 0)
        call.generated_tokens = row["generated_tokens"] or 0
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
        "generated_tokens": call.generated_tokens,
    }
    if call.message is None:
        return row
    turn = call.turn
    return row | {
        "request": call.request,
        "message": json.dumps(call.message),
        "answers": json.dumps(call.answers, default=repr, skipkeys=True),
        "snapshot": call.snapshot,
        **{name: getattr(turn, name) for name in _TURN_FIELDS},
    }


@dataclass(frozen=True, slots=True)
class Opening:
    """First observation of an episode, or the follow-up of a tool session."""

    observation: str | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Why recorded calls could not be replayed to their end."""

    reason: str
    """Short and stable: other_request, other_prompt, other_answer, not_restored, ended_early."""
    detail: str


class Diverged(DataError):
    """The rollout differs from its recording. This ends the attempt; `RecordedCalls.divergence` has the cause."""


EnvironmentAnswer = TypeVar("EnvironmentAnswer", ToolResult, GymStep, Opening)


class RecordedCalls:
    """The recorded calls of one attempt: those made before are replayed in order, new ones are given to the recorder."""

    def __init__(
        self, recorder: Recorder, restoration: Restoration = "none", recorded: Sequence[RecordedCall] = ()
    ) -> None:
        self._recorder = recorder
        self._restoration = restoration
        self._recorded = recorded
        self._session: Snapshotting | None = None
        self._next = 0
        self._answers: list[dict[str, Any] | None] = []
        """The environment's, since the newest call."""
        self._cause: Divergence | None = None

    @property
    def replays(self) -> bool:
        """Return whether the environment can be restored. If so, complete calls are recorded, not only their number."""
        return self._restoration != "none"

    def divergence(self, rollout: Rollout) -> Divergence | None:
        """Why the outcome of `rollout` is void; None when it counts."""
        replayed, left = self._next, len(self._recorded) - self._next
        if self._cause is None and left > 0 and rollout.failure_kind is not FailureKind.INFRA:
            how = rollout.failure_detail or f"it ended with {rollout.finish_reason}"
            return Divergence("ended_early", f"after {replayed} of {replayed + left} recorded calls {how}")
        return self._cause

    def restarted(self, rollout_id: str, divergence: Divergence) -> RecordedCalls:
        """For the same attempt from its first call on, with nothing to replay."""
        self._recorder.went_on(Resumption(rollout_id, len(self._recorded), divergence.reason))
        return RecordedCalls(self._recorder, self._restoration)

    # -- for the policy ---------------------------------------------------------------------------------------------

    def reply_to(self, request: str) -> Completion | None:
        """The recorded reply to the request of that digest; None after the last recorded call."""
        if self._next >= len(self._recorded):
            return None
        call = self._recorded[self._next]
        if call.request != request or len(self._answers) != len(call.answers):
            raise self._diverged("other_request", f"call {call.number} differs from the recorded one")
        prompt = self._prompt(call.finished_turn)
        if digest_tokens(prompt) != call.finished_turn.prompt_digest:
            detail = f"the recorded calls do not give the prompt that the engine saw in call {call.number}"
            raise self._diverged("other_prompt", detail)
        self._answers = []
        self._next += 1
        if self._next == len(self._recorded):
            self._recorder.went_on(Resumption(call.rollout_id, self._next))
        return call.completion(prompt)

    def _prompt(self, turn: Turn) -> list[int]:
        """Return the whole prompt, joined from the parts of the calls that it continues, which may skip the previous
        call."""
        parts = [turn.prompt_token_ids]
        while turn.parent is not None:
            turn = self._recorded[turn.parent].finished_turn
            parts += [turn.generation_token_ids, turn.prompt_token_ids]
        return list(itertools.chain.from_iterable(reversed(parts)))

    def record(self, rollout: Rollout, completion: Completion, request: str = "", snapshot: str | None = None) -> None:
        """Record an engine reply. Without replay, record only the number of generated tokens."""
        number, message = self._next, completion.message if self.replays else None
        self._next += 1
        self._recorder.record(
            RecordedCall(
                rollout.rollout_id,
                rollout.seed,
                number,
                rollout.turns,
                number,
                request,
                message,
                self._answers,
                snapshot,
                len(completion.generation_token_ids),
            )
        )
        self._answers = []

    async def snapshot(self) -> str | None:
        """Return the session's snapshot as JSON; None if it does not support snapshots."""
        if self._restoration != "snapshot" or self._session is None:
            return None
        try:
            return json.dumps(await self._session.snapshot())
        except (TypeError, ValueError) as error:
            raise SnapshotFailed(f"The snapshot of the session is not a JSON value: {error}") from error

    # -- for the environment ----------------------------------------------------------------------------------------

    async def restored(self, environment: EnvironmentClient, row: TaskRow) -> Any | None:
        """The session that the newest recorded call shows; None: it has to begin as usual."""
        if not self._recorded or self._restoration != "snapshot":
            return None
        snapshot = self._recorded[-1].snapshot
        assert snapshot is not None, "the journal hands out no calls without"
        try:
            return await cast(Restorable, environment).restore_session(row, json.loads(snapshot))
        except DataError as error:
            raise self._diverged("not_restored", str(error)) from error

    def begun(self, session: EnvironmentSession | EpisodeSession) -> None:
        """Set the session; its snapshots are recorded."""
        self._session = cast(Snapshotting, session)

    async def answer(
        self, kind: type[EnvironmentAnswer], ask: Callable[[], Awaitable[EnvironmentAnswer]]
    ) -> EnvironmentAnswer:
        """Return an environment's answer: from `ask`, or the recorded one if the session was restored."""
        place, recorded = len(self._answers), self._recorded_answer(len(self._answers))
        self._answers.append(recorded)
        if recorded is not None and self._restoration == "snapshot":
            return kind(**recorded)
        answer = await ask()
        fields = {name: getattr(answer, name) for name in kind.__dataclass_fields__}
        self._answers[place] = fields
        if recorded is not None and _text(fields) != _text(recorded):
            where = f"before call {self._next}, answer {place} of the environment"
            change = f"was {_text(recorded)[:300]} and is now {_text(fields)[:300]}"
            raise self._diverged("other_answer", f"{where} {change}")
        return answer

    def _recorded_answer(self, place: int) -> dict[str, Any] | None:
        if self._next >= len(self._recorded):
            return None
        answers = self._recorded[self._next].answers
        return answers[place] if place < len(answers) else None

    def _diverged(self, reason: str, detail: str) -> Diverged:
        self._cause = self._cause or Divergence(reason, detail)
        return Diverged(f"{reason}: {detail}")


class ReplayingPolicy:
    """A policy that repeats its recorded replies first."""

    def __init__(self, calls: RecordedCalls, rollout: Rollout, policy: PolicyClient) -> None:
        self._calls = calls
        self._rollout = rollout
        self._policy = policy

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        calls = self._calls
        if not calls.replays:
            completion = await self._policy.complete(messages, tools, sampling, seed)
            calls.record(self._rollout, completion)
            return completion
        request = request_digest(messages, tools, sampling, seed)
        if (recorded := calls.reply_to(request)) is not None:
            return recorded
        snapshot = await calls.snapshot()
        completion = await self._policy.complete(messages, tools, sampling, seed)
        calls.record(self._rollout, completion, request, snapshot)
        return completion


class ReplayingEnvironment:
    """An environment that starts a new session or restores the newest snapshot, for either protocol."""

    def __init__(self, calls: RecordedCalls, environment: EnvironmentClient) -> None:
        self._calls = calls
        self._environment = environment

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        session: EnvironmentSession | None = await self._calls.restored(self._environment, row)
        if session is None:
            session = await cast(ToolEnvironment, self._environment).seed_session(row)
        self._calls.begun(session)
        return ReplayingSession(self._calls, session)

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        session: EpisodeSession | None = await self._calls.restored(self._environment, row)

        async def opening() -> Opening:
            nonlocal session
            session, observation = await cast(EpisodeEnvironment, self._environment).reset(row)
            return Opening(observation)

        try:
            first = await self._calls.answer(Opening, opening)
        except Diverged:
            if session is not None and session.needs_close:
                await session.close()  # no agent gets to see it
            raise
        assert session is not None, "restored, or begun for its first observation"
        self._calls.begun(session)
        return ReplayingEpisode(self._calls, session), first.observation


class ReplayingSession:
    """A tool session that repeats its recorded answers first."""

    def __init__(self, calls: RecordedCalls, session: EnvironmentSession) -> None:
        self._calls = calls
        self._session = session
        self.ordered = session.ordered
        self.tools = session.tools
        self.verify = session.verify
        self.close = session.close

    @property
    def needs_close(self) -> bool:
        return self._session.needs_close

    @property
    def answer(self) -> dict[str, Any] | None:
        return self._session.answer

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        return await self._calls.answer(ToolResult, lambda: self._session.call_tool(name, arguments))

    async def follow_up(self, response: dict[str, Any]) -> str | None:
        async def ask() -> Opening:
            return Opening(await self._session.follow_up(response))

        return (await self._calls.answer(Opening, ask)).observation


class ReplayingEpisode:
    """An episode that repeats its recorded steps first."""

    def __init__(self, calls: RecordedCalls, session: EpisodeSession) -> None:
        self._calls = calls
        self._session = session
        self.close = session.close

    @property
    def needs_close(self) -> bool:
        return self._session.needs_close

    async def step(self, response: dict[str, Any]) -> GymStep:
        return await self._calls.answer(GymStep, lambda: self._session.step(response))


def request_digest(messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int) -> str:
    """Equal exactly for equal requests, in whichever process. Token fields are left out: they are those of the replies, which
    the digest of each call ties down."""
    bare = [
        {name: value for name, value in message.items() if name not in TOKEN_FIELDS}
        if TOKEN_FIELDS[0] in message
        else message
        for message in messages
    ]
    data = orjson.dumps([bare, tools, vars(sampling), seed], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).hexdigest()[:32]


def _text(answer: dict[str, Any]) -> str:
    """Serialise an answer, equally before and after a pass through the journal."""
    return json.dumps(answer, sort_keys=True, default=repr, skipkeys=True)


class TurnJournal:
    """Journal of the model calls of one collect stage."""

    def __init__(self, policy_version: int | None = None, oldest_version: int | None = None) -> None:
        """Create an empty journal.

        Args:
            policy_version: use only calls of this version; None uses all calls.
            oldest_version: also use calls of versions from this one on.
        """
        self._oldest_version = policy_version if oldest_version is None else oldest_version
        self.resumptions = ResumptionCounts()
        self._policy_version = policy_version
        self._calls: dict[str, list[RecordedCall]] = {}
        """Calls of unfinished rollouts."""
        self._gaps: set[str] = set()
        """Rollouts of which earlier calls are lost: their part is damaged, or not listed yet."""
        self._waiting: dict[str, list[RecordedCall]] = {}
        self._events: list[Resumption] = []

    def read(self, part: pa.Table, leave_out: Container[str] = ()) -> None:
        """Read a part of an earlier attempt. Later parts override earlier ones.

        Args:
            leave_out: rollouts with calls that are not needed any more.
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
        """Remove a finished rollout. Keep its calls after an infrastructure failure, because another attempt can use
        them."""
        self._forget(rollout.rollout_id)
        if rollout.failure_kind is not FailureKind.INFRA:
            self._waiting.pop(rollout.rollout_id, None)

    def take(self) -> pa.Table | None:
        """Return rows that were not taken before."""
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
    """Counts of resumed and restarted rollouts over all attempts at a stage."""

    def __init__(self) -> None:
        self.rollouts_resumed = 0
        """Times that a rollout resumed after its recorded calls."""
        self.turns_resumed = 0
        """Model calls that were not made again."""
        self.rollouts_restarted: Counter[str] = Counter()
        """Times that a rollout began anew all the same, by reason."""
        self.lost_tokens = 0
        """Generated tokens of the restarted rollouts' calls."""

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
