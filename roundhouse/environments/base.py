"""The base of every environment: tasks, a session, tools and a verifier, in plain Python.

One class serves two homes on the same code: the rollout engine calls it in its own process, and
`roundhouse.compat.nemo_gym.servers.resources` serves it over HTTP (/seed_session, /<tool>, /verify).

Invariant: everything that belongs to one rollout lives in the session object that `seed_session` returned; the environment
itself is shared by all rollouts and never changes. A verifier that cannot judge raises; it never makes up a reward.

    class Weather(Environment):
        name = "weather"

        def tasks(self, split):
            return [task_row("Is it raining in Oslo?", tools=self.tool_schemas(), answer="yes")]

        @tool("Look up the weather.", city="Name of the city.")
        async def weather(self, session, city: str) -> str:
            return "rain"

        async def verify(self, session, row, response):
            return Verdict(reward=float(row["answer"] in final_text(response).lower()))
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Split = Literal["train", "heldout"]
Restoration = Literal["none", "replay", "snapshot"]
"""How a rollout that was interrupted between two model calls can go on.

none       not at all: it starts again from its first call
replay     its tool calls (or steps) are made again on a new session, in order, and must be answered as they were. For worlds
           that answer the same every time, and that nothing outside can tell a repeated call from
snapshot   a session is restored from what it wrote down before the newest model call; earlier calls are not made again
"""
TaskRow = dict[str, Any]
"""A NeMo Gym task row: `responses_create_params` (input, tools) and the verifier's fields beside it. `task_id` is unique."""

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says of a finished rollout."""

    reward: float
    reward_components: dict[str, float] = field(default_factory=dict)
    """Named parts; when given, they sum to the reward."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to report, by name."""
    mask: bool = False
    """True: keep the rollout and its reward on record, but do not train on it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool's name, schema and method."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments (an object)."""
    call: Callable[..., Awaitable[Any]]

    def schema(self) -> dict[str, Any]:
        """The tool as a Responses API function tool."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": True,
        }


def tool(
    description: str, **arguments: str
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
    """Mark a method `async def name(self, session, **arguments)` as a tool; `arguments` describe its parameters."""

    def mark(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        signature = inspect.signature(method, eval_str=True)
        properties: dict[str, Any] = {}
        required: list[str] = []
        for name, parameter in list(signature.parameters.items())[2:]:
            properties[name] = {"type": _JSON_TYPES.get(parameter.annotation, "string")}
            if name in arguments:
                properties[name]["description"] = arguments[name]
            if parameter.default is inspect.Parameter.empty:
                required.append(name)
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        method.__roundhouse_tool__ = (description, schema)  # type: ignore[attr-defined]
        return method

    return mark


def marked_tools(owner: object) -> dict[str, Tool]:
    """The methods of `owner` that `tool` marked, by name."""
    found = {}
    for name in dir(type(owner)):
        mark = getattr(getattr(type(owner), name), "__roundhouse_tool__", None)
        if mark is not None:
            description, schema = mark
            found[name] = Tool(name, description, schema, getattr(owner, name))
    return found


class Environment(ABC):
    """Base class; see the module's docstring for an example."""

    name: ClassVar[str]
    restoration: ClassVar[Restoration] = "none"

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """All tasks of a split, in a fixed order. The two splits share no task."""

    async def seed_session(self, row: TaskRow) -> Any:
        """Begin a rollout: return the state that its tools and verifier work on."""
        return None

    async def close_session(self, session: Any) -> None:
        """Give back what the session holds: a process, a directory, a connection. Called once, however the rollout ended."""

    async def snapshot_session(self, session: Any) -> Any:
        """The session as a JSON value, where `restoration` is snapshot. No tool runs meanwhile."""
        return None

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Any:
        """The session that `snapshot` shows. By default one as at the beginning, for sessions that no tool changes."""
        return await self.seed_session(row)

    @abstractmethod
    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        """Judge a finished rollout. `response` is a Responses object whose `output` holds all new items of all turns."""

    def compute_metrics(self, tasks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        """More metrics of a collection, from its verified rollouts grouped by task."""
        return {}

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[dict[str, Any]]]:
        """Conversations (chat messages with tool calls and results) to warm-start a policy on, if there are any."""
        raise NotImplementedError(f"The environment {self.name} has no demonstrations: start from a pretrained policy.")

    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        return marked_tools(self)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as they stand in a task row."""
        return [tool.schema() for tool in self.tools().values()]


def task_row(prompt: str, *, task_id: str, tools: Sequence[dict[str, Any]] = (), **fields: Any) -> TaskRow:
    """A task row with one user message."""
    return {
        "task_id": task_id,
        "responses_create_params": {"input": [{"role": "user", "content": prompt}], "tools": list(tools)},
        **fields,
    }


def final_text(response: dict[str, Any]) -> str:
    """Text of the last assistant message of a Responses object; empty when there is none."""
    for item in reversed(response.get("output", [])):
        if item.get("type") == "message" and item.get("role") == "assistant":
            return "".join(part.get("text", "") for part in item.get("content", []))
    return ""
