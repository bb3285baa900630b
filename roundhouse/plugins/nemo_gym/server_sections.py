"""Our agent server and resources server as instances of a NeMo Gym configuration.

Invariant: unknown fields are refused, except fields that NeMo Gym adds to every server (`INSTANCE_FIELDS`), so one
configuration serves both.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.section import PositiveFloat, PositiveInt, Section

INSTANCE_FIELDS = frozenset(
    {
        "entrypoint",
        "host",
        "port",
        "num_workers",
        "domain",
        "datasets",
        "verified",
        "verified_url",
        "description",
        "value",
    }
)
"""Fields of an instance about its place and its entry in the catalogue."""


class ServerReference(Section):
    """Another server of the same configuration."""

    type: Literal["resources_servers", "responses_api_agents", "responses_api_models"]
    name: str


class AgentServerConfig(Section):
    """The agent server (`responses_api_agents: roundhouse_agent`): NeMo Gym's `simple_agent` by its field names."""

    resources_server: ServerReference
    """The environment that it plays."""
    model_server: ServerReference
    """Model server that answers as the policy."""
    protocol: Literal["tools", "gymnasium"] = "tools"
    """Protocol of the resources server: /seed_session, /<tool>, /verify, or /reset, /step, /close."""
    model_route: Literal["chat", "responses"] = "chat"
    """Route of the model server: /v1/chat/completions or /v1/responses."""
    max_steps: PositiveInt | None = None
    """Model calls of a rollout; unset: as many as the time limit allows."""
    max_tokens: PositiveInt | None = None
    """Tokens of a whole rollout, prompt included, if the model server returns tokens."""
    timeout_seconds: PositiveFloat = 2100
    """Time limit of one /run, and of one /v1/responses."""
    model_timeout_seconds: PositiveFloat = 600
    """Time limit of one model call."""
    tool_timeout_seconds: PositiveFloat = 300
    """Time limit of one tool call."""
    parallel_tool_calls: bool = False
    """Run the tool calls of one reply at the same time."""
    first_turn_overflow: Literal["judged", "failed"] = "judged"
    """Treatment of a task that does not fit the model's context. judged: it is an empty, incomplete reply that the
    verifier judges, as with NeMo Gym's agent. failed: the row fails (`context_overflow`), without a reward."""
    close_route: str | None = None
    """Route of the resources server that ends a session, if it does not offer one by itself."""
    skip_verification: bool = False
    """Do not ask the verifier: every rollout gets `skip_verification_reward`."""
    skip_verification_reward: float = 0.0
    token_id_capture: bool = False
    """Ask the model server to record this agent's calls, when the configuration's `token_id_capture.enabled` is true."""

    @model_validator(mode="after")
    def _fitting_servers(self) -> Self:
        kinds = {"resources_server": "resources_servers", "model_server": "responses_api_models"}
        for key, kind in kinds.items():
            reference: ServerReference = getattr(self, key)
            if reference.type != kind:
                raise ValueError(
                    f"{key}.type is {reference.type}, and {reference.name} would be asked as one of {kind}. Name one of these."
                )
        return self


class EnvironmentServerConfig(Section):
    """The resources server (`resources_servers: roundhouse_environment`) of one of our environments."""

    environment: EnvironmentConfig
    """Environment as in a run's configuration: a kind and its parameters."""
    expose_tools_over_mcp: bool = False
    """Serve the tools over MCP too, at /mcp, for agents that speak it."""


def own_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """An instance's fields without those of `INSTANCE_FIELDS`."""
    return {key: value for key, value in fields.items() if key not in INSTANCE_FIELDS}
