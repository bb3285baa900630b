"""The section of an environment behind a server of OpenEnv."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from roundhouse.config.environments import EnvironmentSection
from roundhouse.config.section import Operational, PositiveFloat, PositiveInt, Url


class OpenEnvSection(EnvironmentSection):
    """Several turns: an environment of a running OpenEnv server, one WebSocket session per rollout."""

    kind: Literal["openenv"]
    url: Url
    """Base URL of the server."""
    prompt: str | None = None
    """System message, for an environment whose observations do not explain the task."""
    action: str | None = None
    """Field of the environment's action that gets the text of a reply. Unset: the reply is a JSON object, the whole action."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each action."""
    observation: str | None = None
    """Field of the observation that the policy is shown. Unset: all fields, as JSON."""
    tools: bool = False
    """Offer the policy the server's MCP tools. Each call is a step of the environment."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of each reset."""
    train: PositiveInt = 1000
    """Training episodes, each with a seed."""
    heldout: PositiveInt = 100
    """Number of held-out episodes; their seeds follow."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the first episode."""
    timeout_seconds: Operational[PositiveFloat] = 60
    """Time limit of one answer of the server."""

    @model_validator(mode="after")
    def _one_action(self) -> OpenEnvSection:
        if self.tools and self.action is not None:
            raise ValueError(
                "environment.tools is true and environment.action is set: a reply is a tool call or a text. Leave one out."
            )
        return self
