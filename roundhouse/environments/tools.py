"""Tool calls on an environment, with the answers that the HTTP contract prescribes, wherever they are made.

Invariant: whatever arguments a policy invents, the answer is a text it can be shown; only an environment that says that its
infrastructure failed (`InfraError`) ends the rollout. The texts are the bodies that a resources server sends:

    unknown tool     404  {"detail":"Not Found"}
    bad arguments    422  {"detail":[{"type":"missing","loc":["body","city"],"msg":"Field required","input":{}}]}
    the tool raises  500  "ValueError('no such city')"
    a str            200  as it is; anything else as JSON
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from roundhouse.environments.base import Tool
from roundhouse.errors import InfraError

RESERVED = frozenset({"verify", "seed_session", "aggregate_metrics", "mcp"})
"""Routes of the contract, which therefore cannot be tools."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer as the policy sees it."""

    text: str
    status: int = 200
    """The HTTP status that it has, or would have."""
    is_json: bool = True

    @property
    def ok(self) -> bool:
        return self.status < 400


NOT_FOUND = ToolResult('{"detail":"Not Found"}', 404)


def invalid_arguments(error: ValueError) -> ToolResult:
    """The answer to arguments that are not JSON; such a call never reaches the environment."""
    return ToolResult(_json({"error": f"Invalid tool call arguments: {error}"}), 400)


class HasTools(Protocol):
    """An environment, or whatever else has tools."""

    def tools(self) -> dict[str, Tool]: ...


class Toolbox:
    """The tools of one environment and the types of their arguments, made once."""

    def __init__(self, environment: HasTools) -> None:
        self._tools = {
            name: (tool, _arguments_type(tool)) for name, tool in environment.tools().items() if name not in RESERVED
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    async def call(self, session: Any, name: str, arguments: Any) -> ToolResult:
        """Call a tool with arguments as a policy gave them (any JSON value).

        Raises:
            InfraError: the tool says that its infrastructure failed.
        """
        if name not in self._tools:
            return NOT_FOUND
        tool, arguments_type = self._tools[name]
        try:
            checked = arguments_type.validate_python(arguments)
        except ValidationError as error:
            return bad_request(error.errors(include_url=False))
        try:
            return _rendered(await tool.call(session, **checked))
        except InfraError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool's failure is an observation for the policy, not ours
            return raised(error)


def bad_request(details: list[Any]) -> ToolResult:
    """FastAPI's answer to a body that does not validate."""
    return ToolResult(_json({"detail": [{**item, "loc": ["body", *item["loc"]]} for item in details]}), 422)


def raised(error: Exception) -> ToolResult:
    """The answer when a handler raised: a JSON string."""
    text = repr(error).encode("utf-8", "replace").decode()
    return ToolResult(_json(text), 500)


def _rendered(value: Any) -> ToolResult:
    if isinstance(value, str):
        value.encode()  # a lone surrogate could be neither sent nor stored: let it count as the tool's failure
        return ToolResult(value, is_json=False)
    return ToolResult(_json(value))


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
