"""The client of a Gymnasium environment over HTTP (/reset, /step, /close).

Invariant: an episode's session is closed whenever the world offers that, even where its answer to /reset was malformed. A step
is sent again after a lost answer only where the world said `supports_step_idempotency`, under the same `_ng_step_request_id`.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import orjson

from roundhouse.compat.nemo_gym.clients.connection import Connection, json_object
from roundhouse.compat.nemo_gym.clients.resources import (
    RemoteClient,
    RemoteSession,
    lenient_object,
    offers_close,
    refuse,
    refuse_failure_mark,
)
from roundhouse.environments.base import TaskRow
from roundhouse.environments.gymnasium import GymStep
from roundhouse.rollout.agents import GymnasiumLoop
from roundhouse.rollout.failures import (
    EnvironmentTimeout,
    EnvironmentUnreachable,
    StepFailed,
)
from roundhouse.rollout.protocol import EpisodeSession

STEP_ATTEMPTS = 3
STEP_RETRY_SECONDS = 0.5


class RemoteEpisodeClient(RemoteClient):
    """Episodes on a Gymnasium server of NeMo Gym's contract."""

    @property
    def agent(self) -> GymnasiumLoop:
        return GymnasiumLoop()

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        session = _RemoteEpisode(self.connection, row, self.close_route)
        return session, await session.reset()


class _RemoteEpisode(RemoteSession):
    def __init__(self, connection: Connection, row: TaskRow, close_route: str | None) -> None:
        super().__init__(connection, row, close_route)
        self._idempotent = False

    async def reset(self) -> str | None:
        text = await self.begin("reset")
        self.needs_close = self.needs_close or offers_close(lenient_object(text))
        try:
            reply = _object(text, f"{self._connection.url}/reset")
        except StepFailed:
            await self.give_up()
            raise
        self._idempotent = reply["info"].get("supports_step_idempotency") is True
        observation: str | None = reply["observation"]
        return observation

    async def step(self, response: dict[str, Any]) -> GymStep:
        body = {**self._row, "response": response}
        if self._idempotent:
            body["_ng_step_request_id"] = uuid.uuid4().hex
        where = f"{self._connection.url}/step"
        status, text = await self._send(body)
        refuse(status, text, where, StepFailed)
        reply = _object(text, where)
        refuse_failure_mark(reply)
        if "reward" not in reply:
            raise StepFailed(f"{where} answered without a reward: {text}")
        info = reply["info"]
        return GymStep(
            observation=reply["observation"],
            reward=reply["reward"],
            terminated=reply.get("terminated") is True,
            truncated=reply.get("truncated") is True,
            tool_outputs=_tool_outputs(info, where),
            metrics={name: value for name, value in info.items() if isinstance(value, int | float)},
            info=info,
        )

    async def _send(self, body: dict[str, Any]) -> tuple[int, str]:
        attempts = STEP_ATTEMPTS if self._idempotent else 1
        for attempt in range(1, attempts + 1):
            try:
                return await self._connection.post("step", body, self._cookies)
            except (EnvironmentUnreachable, EnvironmentTimeout):
                if attempt == attempts:
                    raise
                await asyncio.sleep(STEP_RETRY_SECONDS)
        raise AssertionError("the loop returns or raises")


def _object(text: str, where: str) -> dict[str, Any]:
    """A Gymnasium answer with `observation` and `info` in their types.

    Raises:
        StepFailed: it is none.
    """
    reply = json_object(text, where, StepFailed)
    reply = {"observation": None, **reply, "info": reply.get("info") or {}}
    if not isinstance(reply["info"], dict) or not isinstance(reply["observation"], str | None):
        raise StepFailed(f"{where}: observation must be a text or null, and info an object: {text}")
    return reply


def _tool_outputs(info: dict[str, Any], where: str) -> dict[str, str]:
    try:
        return {
            str(entry["call_id"]): entry["output"]
            if isinstance(entry["output"], str)
            else orjson.dumps(entry["output"]).decode()
            for entry in info.get("tool_outputs") or []
        }
    except (TypeError, KeyError) as error:
        raise StepFailed(
            f"{where}: info.tool_outputs must be a list of call_id and output ({error!r}): {info}"
        ) from error
