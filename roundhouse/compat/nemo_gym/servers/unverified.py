"""An environment whose verifier is not asked (`skip_verification`).

Invariant: tools and sessions are the environment's own; the reward is the configured one, and the answer says
`verification_skipped`, so that nobody takes it for a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from roundhouse.environments.base import Split, TaskRow, Verdict
from roundhouse.environments.tools import ToolResult
from roundhouse.rollout.agents import ToolLoop
from roundhouse.rollout.protocol import EnvironmentSession, ToolEnvironment


class UnverifiedEnvironment:
    """A tool environment with a fixed reward."""

    def __init__(self, environment: ToolEnvironment, reward: float) -> None:
        self.name = environment.name
        self.restoration = environment.restoration
        self._environment = environment
        self._reward = reward

    @property
    def agent(self) -> ToolLoop:
        return ToolLoop()

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._environment.tasks(split)

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        return _UnverifiedSession(await self._environment.seed_session(row), row, self._reward)

    async def close(self) -> None:
        await self._environment.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _UnverifiedSession:
    def __init__(self, session: EnvironmentSession, row: TaskRow, reward: float) -> None:
        self._session = session
        self._row = row
        self._reward = reward
        self.ordered = session.ordered
        self.tools = session.tools
        self.answer: dict[str, Any] | None = None

    @property
    def needs_close(self) -> bool:
        return self._session.needs_close

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        return await self._session.call_tool(name, arguments)

    async def verify(self, response: dict[str, Any]) -> Verdict:
        self.answer = {**self._row, "response": response, "reward": self._reward, "verification_skipped": True}
        return Verdict(self._reward)

    async def close(self) -> None:
        await self._session.close()
