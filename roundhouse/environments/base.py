"""The base of every environment: tasks, a session, tools and a verifier, or the Gymnasium protocol, in plain Python.

The rollout engine calls the class in its own process, and `roundhouse.plugins.nemo_gym.servers.resources` serves the
same class over HTTP (/seed_session, /<tool>, /verify).

Invariant: a rollout's state is in the session object that `seed_session` (or `reset`) returned; the environment itself
is shared by all rollouts and never changes. A verifier that cannot judge raises; it never invents a reward.

    class Weather(Environment):
        name = "weather"

        def tasks(self, split):
            return [task_row("Is it raining in Oslo?", task_id="oslo", tools=self.tool_schemas(), answer="yes")]

        @tool("Look up the weather.", city="Name of the city.")
        async def weather(self, session, city: str) -> str:
            return "rain"

        async def verify(self, session, row, response):
            return Verdict(reward=float(row["answer"] in final_text(response).lower()))
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, NotRequired, Protocol, TypeVar, overload

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from roundhouse.errors import DataError, InfraError
from roundhouse.generation.tool_calls import broken_call_problem
from roundhouse.trajectories.storable import storable_text
from roundhouse.user_code import describe_error, shown

logger = logging.getLogger(__name__)

Split = Literal["train", "heldout"]
Restoration = Literal["none", "replay", "snapshot"]
"""Method by which a rollout that was interrupted between two model calls resumes.

none       it restarts from its first call
replay     its tool calls (or steps) are repeated on a new session, in order, and must get equal answers. For deterministic
           environments that can be repeated without outside effects
snapshot   a session is restored from its snapshot before the newest model call; earlier calls are not repeated
"""
TaskRow = dict[str, Any]
"""A NeMo Gym task row: `responses_create_params` (input, tools) and the verifier's fields next to it. `task_id` is unique."""

_JSON_TYPES: dict[Any, str] = {
    inspect.Parameter.empty: "string",
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
}


class BadReward(DataError):
    """The verdict's reward (or one of its numbers) is not a finite number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement of a finished rollout."""

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
    """Mark a method `async def name(self, session, **arguments)` as a tool; `arguments` describe its parameters.

    Its schema follows from the annotations by which calls are checked, such as `list[str]`, `Literal["a", "b"]`, `int | None`.
    """

    def mark(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        signature = inspect.signature(method, eval_str=True)
        properties: dict[str, Any] = {}
        required: list[str] = []
        named: dict[str, Any] = {}
        for name, parameter in list(signature.parameters.items())[2:]:
            properties[name] = _schema_of(parameter.annotation)
            named |= properties[name].pop("$defs", {})  # their references begin at the root
            if name in arguments:
                properties[name]["description"] = arguments[name]
            if parameter.default is inspect.Parameter.empty:
                required.append(name)
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        if named:
            schema["$defs"] = named
        method.__roundhouse_tool__ = (description, schema)  # type: ignore[attr-defined]
        return method

    return mark


def _schema_of(annotation: Any) -> dict[str, Any]:
    known = _JSON_TYPES.get(annotation) if isinstance(annotation, type) else None
    return TypeAdapter(annotation).json_schema() if known is None else {"type": known}


def marked_tools(owner: object) -> dict[str, Tool]:
    """The methods of `owner` that `tool` marked, by name."""
    tools = {}
    for name in dir(type(owner)):
        mark = getattr(getattr(type(owner), name), "__roundhouse_tool__", None)
        if mark is not None:
            description, schema = mark
            tools[name] = Tool(name, description, schema, getattr(owner, name))
    return tools


class TaskSource(ABC):
    """Common part of environments of both protocols."""

    name: ClassVar[str]
    restoration: ClassVar[Restoration] = "none"

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """All tasks of a split, in a fixed order. The two splits share no task."""

    def compute_metrics(self, tasks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        """More metrics of a collection, from its verified rollouts grouped by task."""
        return {}

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[dict[str, Any]]]:
        """Conversations (chat messages with tool calls and results) to warm-start a policy on, if there are any."""
        raise NotImplementedError(f"The environment {self.name} has no demonstrations. Start from a pretrained policy.")

    def parts(self) -> Sequence[TaskSource]:
        """The environments of a mixture; of any other environment itself."""
        return (self,)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools of every task row; by default none."""
        return []


class Environment(TaskSource):
    """Base class of environments with tools and a verifier; see the module's docstring for an example."""

    async def seed_session(self, row: TaskRow) -> Any:
        """Begin a rollout: return the state that its tools and verifier work on."""
        return None

    async def close_session(self, session: Any) -> None:
        """Release the session's resources: a process, a directory, a connection. Called once, however the rollout
        ended."""

    async def snapshot_session(self, session: Any) -> Any:
        """Return the session as a JSON value, if `restoration` is snapshot. No tool runs at the same time."""
        return None

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Any:
        """The session that `snapshot` shows. By default one as at the beginning, for sessions that no tool changes."""
        return await self.seed_session(row)

    async def follow_up(self, session: Any, row: TaskRow, response: dict[str, Any]) -> str | None:
        """Answer a reply without a tool call with a user message, such as the next of several instructions. None ends the
        rollout.

        `response` is the Responses object of that one model call. A server of NeMo Gym's contract never asks.
        """
        return None

    @abstractmethod
    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        """Judge a finished rollout. `response` is a Responses object; its `output` holds all new items of all turns."""

    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        return marked_tools(self)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of a task row."""
        return [tool.schema() for tool in self.tools().values()]


def task_row(prompt: str, *, task_id: str, tools: Sequence[dict[str, Any]] = (), **fields: Any) -> TaskRow:
    """A task row with one user message."""
    return {
        "task_id": task_id,
        "responses_create_params": {"input": [{"role": "user", "content": prompt}], "tools": list(tools)},
        **fields,
    }


def final_text(response: dict[str, Any]) -> str:
    """Return the text of the last assistant message of a Responses object; empty without one."""
    for item in reversed(response.get("output", [])):
        if item.get("type") == "message" and item.get("role") == "assistant":
            return "".join(part.get("text", "") for part in item.get("content", []))
    return ""


@dataclass(frozen=True, slots=True)
class GymStep:
    """The environment's answer to an action."""

    observation: str | None
    """Shown to the policy as a user message; None shows nothing."""
    reward: float = 0.0
    terminated: bool = False
    """The episode reached its end."""
    truncated: bool = False
    """A limit of the environment ended it."""
    tool_outputs: dict[str, str] = field(default_factory=dict)
    """Answers to tool calls of the action, by call id."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to report; those of the last step count."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything more, as JSON: kept for the record, not read by the rollout engine."""

    def wire_info(self) -> dict[str, Any]:
        """`info` in the form of an answer to /step: metrics and tool outputs next to it."""
        info = {**self.info, **self.metrics}
        if self.tool_outputs:
            info["tool_outputs"] = [{"call_id": id, "output": text} for id, text in self.tool_outputs.items()]
        return info

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class GymnasiumEnvironment(TaskSource):
    """Base class of episodes without a verifier: `reset`, `step` until terminated or truncated, `close`.

    The return of an episode is the sum of its steps' rewards. `response` in `step` is the Responses object of the
    newest model call alone.
    """

    @abstractmethod
    async def reset(self, row: TaskRow) -> tuple[Any, str | None]:
        """Begin an episode: its state and the first observation."""

    @abstractmethod
    async def step(self, state: Any, response: dict[str, Any]) -> GymStep:
        """Play the policy's newest answer."""

    async def snapshot(self, state: Any) -> Any:
        """Return the state as a JSON value. Required if `restoration` is snapshot."""
        raise NotImplementedError(f"{self.name} declares snapshots but lacks the methods. Define snapshot and restore.")

    async def restore(self, row: TaskRow, snapshot: Any) -> Any:
        """Restore the state of a `snapshot`. Required if `restoration` is snapshot."""
        raise NotImplementedError(f"{self.name} declares snapshots but lacks the methods. Define snapshot and restore.")

    async def close(self, state: Any) -> None:
        """Release the state's resources. Called once, however the episode ended."""


RESERVED = frozenset({"verify", "seed_session", "aggregate_metrics", "mcp"})
"""Routes of the contract, which therefore cannot be tools."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer as the policy sees it."""

    text: str
    status: int = 200
    """The HTTP status that it has, or would have."""
    is_json: bool = True
    reward: float | None = None
    """For the turn that called the tool; a part of the rollout's reward (`Turn.reward`)."""

    @property
    def ok(self) -> bool:
        return self.status < 400


NOT_FOUND = ToolResult('{"detail":"Not Found"}', 404)


MOST_LOGGED = 100
MOST_NESTED = 200
"""Levels of a call's arguments. JSON of more than some 900 cannot be written again."""


def read_arguments(text: str) -> Any:
    """Return the arguments of a tool call.

    Raises:
        ValueError: they are not JSON, or nested too deeply.
    """
    value = orjson.loads(text)
    if text.count("[") + text.count("{") > MOST_NESTED:
        level = [value]
        for _ in range(MOST_NESTED):
            inner = (
                each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
            )
            level = [part for parts in inner for part in parts]
        if level:
            raise ValueError(f"they are nested more than {MOST_NESTED} levels deep")
    return value


def invalid_arguments(arguments: str, error: ValueError) -> ToolResult:
    """The answer to arguments that `read_arguments` refuses; such a call never reaches the environment."""
    return ToolResult(_json({"error": f"Invalid tool call arguments: {broken_call_problem(arguments) or error}"}), 400)


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A tool's result with a reward for the turn: a part of the reward that `verify` gives the whole rollout."""

    answer: Any
    reward: float


class HasTools(Protocol):
    """An environment, or whatever else has tools."""

    def tools(self) -> dict[str, Tool]: ...


class Toolbox:
    """Tools of one environment and the types of their arguments, made once.

    Every tool call, with any arguments, gets a text as its answer; only an environment that reports an infrastructure
    failure (`InfraError`) ends the rollout. The texts are a resources server's bodies: unknown tool 404, bad arguments
    422, an exception 500 (`"ValueError('no such city')"`), a str as it is, anything else as JSON.
    """

    def __init__(self, environment: HasTools) -> None:
        self._raised: set[str] = set()
        """Errors of tools that were logged: one log line each, and `MOST_LOGGED` lines, however many rollouts run into them."""
        self._tools = {
            name: (tool, _arguments_type(tool)) for name, tool in environment.tools().items() if name not in RESERVED
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    async def call(self, session: Any, name: str, arguments: Any) -> ToolResult:
        """Call a tool with a policy's arguments (any JSON value).

        Raises:
            InfraError: the tool reports an infrastructure failure.
        """
        if name not in self._tools:
            return NOT_FOUND
        tool, arguments_type = self._tools[name]
        try:
            checked = arguments_type.validate_python(arguments)
        except ValidationError as error:
            return bad_request(error.errors(include_url=False))
        try:
            value = await tool.call(session, **checked)
            value, reward = (value.answer, value.reward) if isinstance(value, Rewarded) else (value, None)
            if isinstance(value, str):
                return ToolResult(storable_text(value), is_json=False, reward=reward)
            return ToolResult(_json(value), reward=reward)
        except InfraError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool's failure is an observation for the policy, not ours
            text = f"{name} raised {describe_error(error)}"
            if text not in self._raised and len(self._raised) < MOST_LOGGED:
                self._raised.add(text)
                logger.warning("The policy is shown an error of a tool: %s", text)
            return raised(error)


def bad_request(details: list[Any]) -> ToolResult:
    """FastAPI's answer to a body that does not validate."""
    return ToolResult(_json({"detail": [{**item, "loc": ["body", *item["loc"]]} for item in details]}), 422)


def raised(error: Exception) -> ToolResult:
    """The answer when a handler raised: a JSON string."""
    return ToolResult(_json(storable_text(shown(error))), 500)


def _json(value: Any) -> str:
    return orjson.dumps(value, default=_dump, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()


def _dump(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, BaseException):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be shown as JSON")


def _arguments_type(tool: Tool) -> TypeAdapter[dict[str, Any]]:
    """The tool's parameters (all but the session) as a type that validates a JSON object as FastAPI would."""
    parameters = list(inspect.signature(tool.call, eval_str=True).parameters.values())[1:]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[parameter.name] = annotation if parameter.default is parameter.empty else NotRequired[annotation]
    make_type: Any = TypedDict  # a type checker wants the fields written out; here the method's signature has them
    arguments = make_type(f"{tool.name}_arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="allow" if open_ended else "forbid")
    return TypeAdapter(arguments)


P = TypeVar("P")


class TaskList(Sequence[TaskRow], Generic[P]):
    """Task rows made when they are asked for: a split may have tens of thousands of problems."""

    def __init__(self, problems: Sequence[P], row: Callable[[P], TaskRow]) -> None:
        self._problems = problems
        self._row = row

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> TaskRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskRow]: ...
    def __getitem__(self, index: int | slice) -> TaskRow | Sequence[TaskRow]:
        if isinstance(index, slice):
            return TaskList(self._problems[index], self._row)
        return self._row(self._problems[index])


def closing_text(response: dict[str, Any]) -> str | None:
    """The text with which the rollout ended; None when it ended with something else, such as a tool call."""
    output = response.get("output", [])
    if not output or output[-1].get("type") != "message":
        return None
    return final_text(response)
