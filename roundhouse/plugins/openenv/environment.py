"""The environment: an episode is one WebSocket session of an OpenEnv server, from its reset to `done`.

Invariant: the return of an episode is the sum of the rewards that the server sends, each taken over as it is. A step is sent
once: a session that breaks ends the rollout as an infrastructure failure, which is played again from a reset.

    {"type": "reset", "data": {"seed": 3}}          -> {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": <the action>}          -> the same, or {"type": "error", "data": {message, code}}
    {"type": "close"}

A reply that cannot be an action (not JSON, a field of another type) is answered with the problem, as a tool's error is, and
the environment makes no step.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from roundhouse.environments.base import GymnasiumEnvironment, GymStep, Split, TaskRow, final_text, read_arguments
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.http.clients import client_session
from roundhouse.rollout.protocol import EnvironmentTimeout, EnvironmentUnavailable, EnvironmentUnreachable, StepFailed
from roundhouse.strict_json import read_json

MOST_MESSAGE_BYTES = 16 * 2**20
BAD_ACTION = "VALIDATION_ERROR"
BUSY = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Codes of failures of the server, not of the action."""


class _ActionRefused(DataError):
    """The server cannot read the action."""


@dataclass(slots=True)
class OpenEnvSession:
    """One connection and its episode."""

    http: aiohttp.ClientSession
    socket: aiohttp.ClientWebSocketResponse
    timeout_seconds: float

    @classmethod
    async def connect(cls, url: str, timeout_seconds: float) -> OpenEnvSession:
        """Begin a session.

        Raises:
            EnvironmentUnreachable: the server does not accept it.
        """
        http = client_session()
        try:
            async with asyncio.timeout(timeout_seconds):
                socket = await http.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=MOST_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await http.close()
            raise EnvironmentUnreachable(f"No OpenEnv server accepts a session at {url}: {error!r}") from error
        return cls(http, socket, timeout_seconds)

    async def call(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer's data.

        Raises:
            _ActionRefused: the server rejects the action.
            StepFailed: the environment raised an error.
            InfraError: the server failed, or does not answer.
        """
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await self.socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self.socket.receive()
        except TimeoutError as error:
            raise EnvironmentTimeout(f"OpenEnv did not answer {kind} in {self.timeout_seconds:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentUnreachable(f"The session broke at {kind}: {error!r}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentUnreachable(
                f"The session was closed at {kind} ({message.type.name}: {message.data!r:.200})."
            )
        return _answer(kind, message.data)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(5):
                await self.socket.send_str('{"type": "close"}')
                await self.socket.close()
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass  # the server ends the session when the connection has ended
        finally:
            await self.http.close()


class OpenEnv(GymnasiumEnvironment):
    """Episodes of one server."""

    name = "openenv"

    def __init__(
        self,
        url: str,
        prompt: str | None = None,
        action: str | None = None,
        fields: Mapping[str, Any] | None = None,
        observation: str | None = None,
        tools: bool = False,
        reset: Mapping[str, Any] | None = None,
        train: int = 1000,
        heldout: int = 100,
        seed: int = 0,
        timeout_seconds: float = 60,
    ) -> None:
        """
        Raises:
            ConfigError: the tools of the server cannot be listed.
        """
        self._url, self._seconds = url, timeout_seconds
        self._action, self._fields, self._observation = action, dict(fields or {}), observation
        self._reset = dict(reset or {})
        self._seeds: dict[Split, range] = {
            "train": range(seed, seed + train),
            "heldout": range(seed + train, seed + train + heldout),
        }
        self._input = [{"role": "system", "content": prompt}] if prompt else []
        self._tools = _run(self._list_tools(seed)) if tools else []

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        params = {"input": self._input, "tools": self._tools}
        return [{"task_id": str(seed), "responses_create_params": params, "seed": seed} for seed in self._seeds[split]]

    async def reset(self, row: TaskRow) -> tuple[OpenEnvSession, str | None]:
        session = await OpenEnvSession.connect(self._url, self._seconds)
        try:
            data = await session.call("reset", {**self._reset, "seed": row["seed"]})
        except BaseException:
            await session.close()
            raise
        return session, self._shown(data)

    async def step(self, state: OpenEnvSession, response: dict[str, Any]) -> GymStep:
        calls = [item for item in response.get("output", []) if item.get("type") == "function_call"]
        if not self._tools or not calls:
            return await self._text_step(state, final_text(response))
        outputs, reward, terminated = {}, 0.0, False
        for call in calls:
            if terminated:
                outputs[call["call_id"]] = "The episode has ended."
                continue
            try:
                arguments = read_arguments(call["arguments"] or "{}")
                action = {"type": "call_tool", "tool_name": call["name"], "arguments": arguments}
                data = await state.call("step", action)
            except (ValueError, _ActionRefused) as error:
                outputs[call["call_id"]] = f"Invalid tool call: {error}"
                continue
            outputs[call["call_id"]] = _tool_output(data)
            reward, terminated = reward + _reward(data), _done(data)
        return GymStep(None, reward, terminated=terminated, tool_outputs=outputs)

    async def _text_step(self, state: OpenEnvSession, text: str) -> GymStep:
        try:
            action = self._fields | ({self._action: text} if self._action is not None else _json_action(text))
            data = await state.call("step", action)
        except (ValueError, _ActionRefused) as error:
            return GymStep(f"Invalid action: {error}", metrics={"invalid_action": 1.0})
        terminated = _done(data)
        return GymStep(None if terminated else self._shown(data), _reward(data), terminated=terminated)

    async def close(self, state: OpenEnvSession) -> None:
        await state.close()

    def _shown(self, data: dict[str, Any]) -> str:
        observation = data["observation"]
        if self._observation is None:
            return json.dumps({name: value for name, value in observation.items() if name != "metadata"})
        if self._observation not in observation:
            raise DataError(
                f"environment.observation is {self._observation}, but the observation has {', '.join(observation)}. Name one "
                "of these, or leave it out."
            )
        value = observation[self._observation]
        return value if isinstance(value, str) else json.dumps(value)

    async def _list_tools(self, seed: int) -> list[dict[str, Any]]:
        session = await OpenEnvSession.connect(self._url, self._seconds)
        try:
            await session.call("reset", {**self._reset, "seed": seed})
            listed = (await session.call("step", {"type": "list_tools"}))["observation"].get("tools")
        finally:
            await session.close()
        if not isinstance(listed, list) or not listed:
            raise ConfigError(
                f"environment.tools is true, but the server at {self._url} lists no MCP tools. Leave it out."
            )
        return [
            {
                "type": "function",
                "name": each["name"],
                "description": each.get("description") or "",
                "parameters": each.get("input_schema") or {"type": "object", "properties": {}},
                "strict": False,
            }
            for each in listed
        ]


def _run(work: Any) -> Any:
    """Await at the construction, which may run inside of an event loop."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(asyncio.run, work).result()
        except (InfraError, DataError) as error:
            raise ConfigError(f"environment.tools is true, but the tools cannot be listed: {error}") from error


def _answer(kind: str, text: str) -> dict[str, Any]:
    try:
        answer = read_json(text)
    except ValueError as error:
        raise EnvironmentUnavailable(f"The answer to {kind} is not JSON: {error}") from error
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        raise EnvironmentUnavailable(f"The answer to {kind} is not a message of OpenEnv: {text[:200]!r}")
    if answer.get("type") == "error":
        code, problem = data.get("code"), f"{data.get('message')} {data.get('errors') or ''}".strip()[:1000]
        if code == BAD_ACTION and kind == "step":
            raise _ActionRefused(problem)
        if code in BUSY:
            raise EnvironmentUnavailable(f"OpenEnv answers {kind} with {code}: {problem}")
        raise StepFailed(f"OpenEnv answers {kind} with {code}: {problem}")
    if answer.get("type") != "observation" or not isinstance(data.get("observation"), dict):
        raise EnvironmentUnavailable(f"The answer to {kind} has no observation: {text[:200]!r}")
    return data


def _reward(data: dict[str, Any]) -> float:
    reward = data.get("reward")
    if reward is None:
        return 0.0
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise DataError(f"The server's reward is {reward!r}, not a finite number.")
    return float(reward)


def _done(data: dict[str, Any]) -> bool:
    return data.get("done") is True


def _json_action(text: str) -> dict[str, Any]:
    begin, end = text.find("{"), text.rfind("}")
    if begin < 0 or end < begin:
        raise ValueError("answer with a JSON object, the action")
    action = read_arguments(text[begin : end + 1])
    if not isinstance(action, dict):
        raise ValueError("answer with a JSON object, the action")
    return action


def _tool_output(data: dict[str, Any]) -> str:
    observation = data["observation"]
    result = observation.get("error") or observation.get("result", observation)
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)
