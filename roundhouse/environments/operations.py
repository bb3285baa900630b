"""Operations of user code that a process answers (`host`): those of an environment, and plain functions.

A process is started with the name of a function of this kind, `module:function`, and with the function's one argument as JSON.
The function loads the code and returns `HostedOperations`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from pydantic import TypeAdapter

from roundhouse.config.environments import EnvironmentConfig
from roundhouse.environments import load_any
from roundhouse.environments.base import Environment, GymnasiumEnvironment, GymStep, Toolbox, ToolResult, Verdict
from roundhouse.imports import load_function


@dataclass(slots=True)
class HostedSession:
    """State of one rollout in the process."""

    row: Any = None
    state: Any = None


Operation = Callable[..., Awaitable[Any]]
"""The first argument is the session, the others are JSON values. The result is JSON, or has a type in `results`."""


Ask = Callable[..., Awaitable[Any]]
"""Ask the process that made the call: a name and JSON values. Raises the errors of its answer, or `host_messages.Refused`."""


@dataclass(frozen=True, slots=True)
class HostedOperations:
    """Operations that a separate process offers, by name."""

    operations: Mapping[str, Operation]
    results: Mapping[str, type] = field(default_factory=dict)
    """Types of results that are not JSON values."""
    of_row: frozenset[str] = frozenset()
    """Operations with errors that name the fields of the task row."""
    asking: frozenset[str] = frozenset()
    """Operations that ask the process that calls them. Their first argument is an `Ask`, the second the session."""

    def written(self, operation: str, value: Any) -> Any:
        """Return a result as JSON; of a wrong type, the name of that type."""
        if (kind := self.results.get(operation)) is None:
            return value
        return fields_of(value) if isinstance(value, kind) else type(value).__name__


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, none of them copied."""
    return {name: getattr(value, name) for name in _field_names(value.__class__)}


@functools.cache
def _field_names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def of_environment(config: dict[str, Any]) -> HostedOperations:
    """Load the environment of a section.

    Raises:
        ConfigError: as `load_any`.
    """
    environment = load_any(TypeAdapter(EnvironmentConfig).validate_python(config))
    results = {"call_tool": ToolResult, "verify": Verdict, "step": GymStep}
    return HostedOperations(
        operations_of(environment), results, frozenset({"seed_session", "follow_up", "verify", "reset"})
    )


def of_functions(targets: dict[str, str]) -> HostedOperations:
    """Load functions of a task row and more arguments, by the configuration key that names each.

    Raises:
        ConfigError: as `load_function`.
    """
    functions = {key: function_operation(load_function(target, key)) for key, target in targets.items()}
    return HostedOperations(functions, of_row=frozenset(functions))


def function_operation(
    function: Callable[..., Any], arguments: Callable[..., tuple[Any, ...]] = lambda *values: values
) -> Operation:
    """Return the operation that calls a function, plain or `async`.

    A dataclass that the function returns becomes `[its name, its fields]`, any other value `["", the value]`.

    Args:
        arguments: makes the function's arguments of the JSON values of a call, the first of which is the task row.
    """

    async def call(session: HostedSession, *values: Any) -> Any:
        session.row = values[0]
        result = function(*arguments(*values))
        result = await result if inspect.isawaitable(result) else result
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            return [type(result).__name__, fields_of(result)]
        return ["", result]

    return call


def operations_of(environment: Environment | GymnasiumEnvironment) -> dict[str, Operation]:
    """Return the calls that an environment answers, by name; the first argument of each is the session."""
    if isinstance(environment, GymnasiumEnvironment):
        return _episode_operations(environment)
    tools = environment
    toolbox = Toolbox(tools)

    async def seed(session: HostedSession, row: Any) -> None:
        session.row = row
        session.state = await tools.seed_session(row)

    async def restore(session: HostedSession, row: Any, snapshot: Any) -> None:
        session.row, session.state = row, await tools.restore_session(row, snapshot)

    async def verify(session: HostedSession, response: Any) -> Any:
        verdict: Any = tools.verify(session.state, session.row, response)
        verdict = await verdict if inspect.isawaitable(verdict) else verdict
        return Verdict(verdict) if isinstance(verdict, Real) else verdict  # type: ignore[arg-type]  # checked by the agent

    return {
        "seed_session": seed,
        "restore_session": restore,
        "call_tool": lambda session, name, arguments: toolbox.call(session.state, name, arguments),
        "follow_up": lambda session, response: tools.follow_up(session.state, session.row, response),
        "verify": verify,
        "snapshot_session": lambda session: tools.snapshot_session(session.state),
        "close_session": lambda session: tools.close_session(session.state),
    }


def _episode_operations(world: GymnasiumEnvironment) -> dict[str, Operation]:
    async def reset(session: HostedSession, row: Any) -> str | None:
        session.row = row
        session.state, observation = await world.reset(row)
        return observation

    async def restore(session: HostedSession, row: Any, snapshot: Any) -> None:
        session.state = await world.restore(row, snapshot)

    return {
        "reset": reset,
        "restore": restore,
        "step": lambda session, response: world.step(session.state, response),
        "snapshot": lambda session: world.snapshot(session.state),
        "close": lambda session: world.close(session.state),
    }
