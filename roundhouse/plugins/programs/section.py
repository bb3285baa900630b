"""The section of a program of the user that plays the rollouts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roundhouse.config.environments import FileEnvironment
from roundhouse.config.secrets import VariableName
from roundhouse.config.section import Code, Target


class CommandEnvironment(FileEnvironment):
    """Rollouts played by a program. It starts once per rollout and calls the policy at a separate base URL."""

    has_own_loop: ClassVar[bool] = True
    own_limits: ClassVar[tuple[str, ...]] = ("system_prompt", "parallel_tool_calls")
    kind: Literal["command"]
    command: Code[Annotated[tuple[str, ...], Field(min_length=1)]]
    """The program and its arguments. It runs in an empty directory. Its environment has the base URL and a key in the variables
    of the OpenAI and Anthropic SDKs, and the paths of its task and of its optional result. An argument that is the path of an
    existing file is passed as its absolute path."""
    verifier: Target | None = None
    """`module:function` or `path/to/file.py:function` of (task row, `CommandOutcome`) that returns the reward or a `Verdict`.
    Unset: the program writes the reward to its result file."""
    variables: tuple[VariableName, ...] = ()
    """Environment variables of the collector that the program gets in addition to PATH, HOME and the like. This is the only way
    to pass a secret."""

    def elsewhere(self) -> str:
        return (
            f"environment.kind is command ({self.command[0]}): this program plays the rollouts. It has no demonstrations and "
            "cannot be served. Set policy.kind to pretrained."
        )
