"""The section of an environment that verifiers plays."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import field_validator

from roundhouse.config.environments import SplitEnvironment
from roundhouse.config.secrets import VariableName
from roundhouse.config.section import Code, Operational, PositiveFloat, PositiveInt


class VerifiersSection(SplitEnvironment):
    """An environment package of verifiers 0.4, played by verifiers in a separate interpreter. The policy answers its calls."""

    has_own_loop: ClassVar[bool] = True
    own_limits: ClassVar[tuple[str, ...]] = ("system_prompt", "parallel_tool_calls")
    kind: Literal["verifiers"]
    python: Code[str | None] = None
    """Interpreter in which verifiers and the environment package are installed. Unset: that of `roundhouse plugins install
    verifiers`."""
    env: Code[dict[str, Any]]
    """The block `env` of a configuration of verifiers: `taskset: {id: …}`, seats, and keys of these. A seat without a `runtime`
    runs in a local process."""
    tasks: PositiveInt | None = None
    """Number of tasks that are read. Unset: all, which a task set without an end refuses."""
    variables: tuple[VariableName, ...] = ()
    """Environment variables that the interpreter gets in addition to PATH, HOME and the like. This is the only way to pass a
    secret."""
    start_timeout_seconds: Operational[PositiveFloat] = 600
    """Time limit for reading the tasks before the run, and of a start of the interpreter."""

    @field_validator("env")
    @classmethod
    def _names_a_task_set(cls, env: dict[str, Any]) -> dict[str, Any]:
        taskset = env.get("taskset")
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
            raise ValueError("environment.env lacks a task set. Set environment.env.taskset.id to that of a package.")
        return env

    def elsewhere(self) -> str:
        return (
            f"environment.kind is verifiers ({self.env['taskset']['id']}): verifiers plays the rollouts in its own "
            "interpreter. It lacks demonstrations and cannot be served. Set policy.kind to pretrained."
        )
