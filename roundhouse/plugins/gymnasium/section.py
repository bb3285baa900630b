"""The section of an environment of the package gymnasium."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from roundhouse.config.environments import EnvironmentSection
from roundhouse.config.section import Code, PositiveInt


class GymnasiumSection(EnvironmentSection):
    """Several turns: an environment of the package gymnasium. A reply is one action."""

    kind: Literal["gymnasium"]
    id: Code[str]
    """Id of an environment, such as `FrozenLake-v1`; `module:Id-v0` imports the module that registers it first."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment, such as `map_name`."""
    actions: tuple[str, ...] = ()
    """Names of the actions of a discrete space, by number. The last name in a reply counts. Unset: the last number counts."""
    observation: Literal["state", "render"] = "state"
    """What the policy is shown: the observation as text or JSON, or the text that `render_mode: ansi` draws."""
    prompt: str | None = None
    """System message, which explains the task. Unset: the names or the range of the actions."""
    train: PositiveInt = 1000
    """Training episodes, each with a seed."""
    heldout: PositiveInt = 100
    """Number of held-out episodes; their seeds follow."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the first episode."""
