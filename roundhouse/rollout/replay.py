"""One attempt's tape: the model calls that were finished before are played back, those after them are recorded.

Invariants: a recorded reply is given to no other request than the one that it answered (messages, tools, sampling and seed, by
digest), and only when the environment had answered what it had answered then. Where anything differs, `divergence` says what,
and the attempt's outcome is void: the rollout has to start afresh. Behind the tape's end engine and environment are asked as
ever, under the same seeds.

    recorded before                  call 0 ── tool ── call 1
    resumed, environment replays     call 0    TOOL    call 1 ── TOOL ── CALL 2 …       CAPITALS: really called
    resumed, from a snapshot         call 0    tool    call 1 ── TOOL ── CALL 2 …

What the environment answered after the newest finished call is not on the tape: it is asked for that again.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from roundhouse.environments.base import Restoration, TaskRow
from roundhouse.environments.gymnasium import Step
from roundhouse.environments.tools import ToolResult
from roundhouse.errors import DataError
from roundhouse.generation.protocol import Completion, PolicyClient
from roundhouse.rollout.failures import SnapshotFailed
from roundhouse.rollout.protocol import (
    EnvironmentSession,
    EpisodeEnvironment,
    EpisodeSession,
    Restorable,
    Snapshotting,
    ToolEnvironment,
)
from roundhouse.rollout.recorded_calls import RecordedCall, Recorder, Resumption
from roundhouse.rollout.taped import TapedEpisode, TapedPolicy, TapedSession
from roundhouse.trajectories.records import FailureKind, Rollout


@dataclass(frozen=True, slots=True)
class Opening:
    """What an episode begins with."""

    observation: str | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Why a tape could not be played to its end."""

    reason: str
    """Short and stable: other_request, other_answer, not_restored, ended_early."""
    detail: str


class Diverged(DataError):
    """The rollout went another way than its tape. It ends the attempt, and `Tape.divergence` is what counts."""


Answer = TypeVar("Answer", ToolResult, Step, Opening)


class Tape:
    """One attempt's tape; without a `recorder` it neither plays nor records."""

    def __init__(
        self,
        recorder: Recorder | None = None,
        restoration: Restoration = "none",
        recorded: Sequence[RecordedCall] = (),
    ) -> None:
        self._recorder = recorder
        self._restoration = restoration
        self._recorded = recorded
        self._session: Snapshotting | None = None
        self._next = 0
        self._answers: list[dict[str, Any] | None] = []
        """Since the newest call."""
        self._tokens: list[int] = []
        """Prompt and generation of the newest call that was played back."""
        self._cause: Divergence | None = None

    # -- for the rollout's border -----------------------------------------------------------------------------------

    def of(self, rollout: Rollout, policy: PolicyClient) -> PolicyClient:
        """Begin `rollout`; the policy that it is to ask."""
        return policy if self._recorder is None else TapedPolicy(self, rollout, policy)

    def divergence(self, rollout: Rollout) -> Divergence | None:
        """Why the outcome of `rollout` is void; None when it counts."""
        played, left = self._next, len(self._recorded) - self._next
        if self._cause is None and left > 0 and rollout.failure_kind is not FailureKind.INFRA:
            how = rollout.failure_detail or f"it ended with {rollout.finish_reason}"
            return Divergence("ended_early", f"after {played} of {played + left} recorded calls {how}")
        return self._cause

    def blank(self, rollout_id: str, divergence: Divergence) -> Tape:
        """The tape of the same attempt, started afresh."""
        if self._recorder is not None:
            self._recorder.went_on(Resumption(rollout_id, len(self._recorded), divergence.reason))
        return Tape(self._recorder, self._restoration)

    # -- for the agents: the environment ----------------------------------------------------------------------------

    async def seed_session(self, environment: ToolEnvironment, row: TaskRow) -> EnvironmentSession:
        """A session of `environment`: a new one, or the one that the tape's newest snapshot shows."""
        if not self.plays:
            return await environment.seed_session(row)
        if self._recorded and self._restoration == "snapshot":
            session: EnvironmentSession = await self._restored(environment, row)
        else:
            session = await environment.seed_session(row)
        self._session = cast(Snapshotting, session)
        return TapedSession(self, session)

    async def reset(self, environment: EpisodeEnvironment, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        """An episode of `environment`, as for a session."""
        if not self.plays:
            return await environment.reset(row)
        begun: list[EpisodeSession] = []

        async def opening() -> Opening:
            session, observation = await environment.reset(row)
            begun.append(session)
            return Opening(observation)

        if self._recorded and self._restoration == "snapshot":
            begun.append(await self._restored(environment, row))
        try:
            first = await self.answer(Opening, opening)
        except Diverged:
            if begun[0].needs_close:
                await begun[0].close()  # nobody will get to see it
            raise
        self._session = cast(Snapshotting, begun[0])
        return TapedEpisode(self, begun[0]), first.observation

    async def answer(self, kind: type[Answer], ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """An answer of the environment: `ask`ed for, or the recorded one where the session was restored."""
        place, recorded = len(self._answers), self._recorded_answer(len(self._answers))
        self._answers.append(recorded)
        if recorded is not None and self._restoration == "snapshot":
            return kind(**recorded)
        told = await ask()
        shown = {name: getattr(told, name) for name in kind.__dataclass_fields__}
        self._answers[place] = shown
        if recorded is not None and _text(shown) != _text(recorded):
            where = f"before call {self._next}, answer {place} of the environment"
            change = f"was {_text(recorded)[:300]} and is now {_text(shown)[:300]}"
            raise self._diverged("other_answer", f"{where} {change}")
        return told

    def _recorded_answer(self, place: int) -> dict[str, Any] | None:
        if self._next >= len(self._recorded):
            return None
        answers = self._recorded[self._next].answers
        return answers[place] if place < len(answers) else None

    async def _restored(self, environment: Any, row: TaskRow) -> Any:
        snapshot = self._recorded[-1].snapshot
        assert snapshot is not None, "the journal hands out no calls without"
        try:
            return await cast(Restorable, environment).restore_session(row, json.loads(snapshot))
        except DataError as error:
            raise self._diverged("not_restored", str(error)) from error

    # -- for the policy ---------------------------------------------------------------------------------------------

    @property
    def plays(self) -> bool:
        """Whether it can hold more than the bare fact of a call."""
        return self._recorder is not None and self._restoration != "none"

    def played_back(self, request: str) -> Completion | None:
        """The recorded reply to the request of that digest; None behind the tape's end, where the engine is to be asked."""
        if self._next >= len(self._recorded):
            return None
        call = self._recorded[self._next]
        if call.request != request or len(self._answers) != len(call.answers):
            raise self._diverged("other_request", f"call {call.number} is not the one that was recorded")
        completion = call.completion(self._tokens)
        self._tokens = completion.prompt_token_ids + completion.generation_token_ids
        self._answers = []
        self._next += 1
        if self._next == len(self._recorded) and self._recorder is not None:
            self._recorder.went_on(Resumption(call.rollout_id, self._next))
        return completion

    def record(
        self, rollout: Rollout, request: str = "", snapshot: str | None = None, completion: Completion | None = None
    ) -> None:
        """The engine has answered. Without its `completion`, only the fact is noted."""
        assert self._recorder is not None, "without a recorder the policy is not taped"
        number, message = self._next, None if completion is None else completion.message
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
            )
        )
        self._answers = []

    async def snapshot(self) -> str | None:
        """The session as it is now, where it can be written down."""
        if self._restoration != "snapshot" or self._session is None:
            return None
        try:
            return json.dumps(await self._session.snapshot())
        except (TypeError, ValueError) as error:
            raise SnapshotFailed(f"The snapshot of the session is no JSON value: {error}") from error

    def _diverged(self, reason: str, detail: str) -> Diverged:
        self._cause = self._cause or Divergence(reason, detail)
        return Diverged(f"{reason}: {detail}")


def _text(answer: dict[str, Any]) -> str:
    """Equal for an answer and for what the journal holds of it."""
    return json.dumps(answer, sort_keys=True, default=repr)
