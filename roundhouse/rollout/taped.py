"""Policies and sessions whose answers go over a tape: to an agent they look like those behind them.

Invariant: a call's digest is equal exactly for equal requests, whichever process makes it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import orjson

from roundhouse.config.models import Sampling
from roundhouse.environments.gymnasium import Step
from roundhouse.environments.tools import ToolResult
from roundhouse.generation.protocol import TOKEN_FIELDS, Completion, PolicyClient
from roundhouse.rollout.protocol import EnvironmentSession, EpisodeSession
from roundhouse.trajectories.records import Rollout

if TYPE_CHECKING:
    from roundhouse.rollout.replay import Tape


class TapedPolicy:
    """A policy whose finished calls are on the tape."""

    def __init__(self, tape: Tape, rollout: Rollout, policy: PolicyClient) -> None:
        self._tape = tape
        self._rollout = rollout
        self._policy = policy

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        tape = self._tape
        if not tape.plays:
            completion = await self._policy.complete(messages, tools, sampling, seed)
            tape.record(self._rollout)
            return completion
        request = request_digest(messages, tools, sampling, seed)
        if (recorded := tape.played_back(request)) is not None:
            return recorded
        snapshot = await tape.snapshot()
        completion = await self._policy.complete(messages, tools, sampling, seed)
        tape.record(self._rollout, request, snapshot, completion)
        return completion


class TapedSession:
    """A tool session whose answers are on the tape."""

    def __init__(self, tape: Tape, session: EnvironmentSession) -> None:
        self._tape = tape
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
        return await self._tape.answer(ToolResult, lambda: self._session.call_tool(name, arguments))


class TapedEpisode:
    """An episode whose steps are on the tape."""

    def __init__(self, tape: Tape, session: EpisodeSession) -> None:
        self._tape = tape
        self._session = session
        self.close = session.close

    @property
    def needs_close(self) -> bool:
        return self._session.needs_close

    async def step(self, response: dict[str, Any]) -> Step:
        return await self._tape.answer(Step, lambda: self._session.step(response))


def request_digest(messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int) -> str:
    """Equal for equal requests. Tokens are left out: they are those of the replies, which the digest of each call ties down."""
    bare = [
        {name: value for name, value in message.items() if name not in TOKEN_FIELDS}
        if TOKEN_FIELDS[0] in message
        else message
        for message in messages
    ]
    data = orjson.dumps([bare, tools, vars(sampling), seed], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).hexdigest()[:32]
