"""Environments that live in other processes and are reached over HTTP, by NeMo Gym's contracts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from roundhouse.config.secrets import VariableName
from roundhouse.config.section import Operational, Section

Url = Annotated[str, Field(pattern=r"^https?://[^/]+")]
ServerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]+([-_][A-Za-z0-9]+)*$")]
"""Without double underscores, which end it in a tool's name."""
McpServers = dict[ServerName, Url]


class RemoteEnvironment(Section):
    """A resources server reached by URL; the agent loop runs in the collector."""

    kind: Literal["remote"]
    url: str
    """Base URL of the resources server."""
    protocol: Literal["tools", "gymnasium"] = "tools"
    """`tools`: /seed_session, /<tool>, /verify. `gymnasium`: /reset, /step and, where it is offered, /close."""
    close_route: Annotated[str, Field(pattern=r"^/[\w./-]+$")] | None = None
    """Route that ends a session, such as /end_session, on servers that have one but do not offer it in their answers."""
    mcp_servers: McpServers = Field(default_factory=dict)
    """MCP servers (streamable HTTP) whose tools the policy gets as well, as `mcp__<name>__<tool>`: URL by name."""
    session_mcp: bool = True
    """Offer the policy the MCP tools that the server's answer to /seed_session offers, but for those that the row has already.
    False passes the offer over, and saves the connection that each rollout would have."""
    restore: Operational[Literal["none", "replay"]] = "none"
    """What becomes of a rollout that was interrupted between two model calls. `none`: it starts again. `replay`: its finished
    model calls are kept, and its tool calls (or steps) are made again on a new session, in order; where an answer differs, it
    starts again after all. For servers that answer the same every time and where a repeated call changes nothing outside the
    session."""
    train_tasks: str
    """JSON lines file of training task rows."""
    heldout_tasks: str | None = None
    """JSON lines file of held-out task rows."""

    @model_validator(mode="after")
    def _repeatable(self) -> RemoteEnvironment:
        if self.mcp_servers and self.restore != "none":
            raise ValueError(
                f"environment.restore is {self.restore}, but environment.mcp_servers is set: all rollouts share those servers, "
                "so that their calls cannot be repeated for one. Leave one of the two out."
            )
        return self

    @model_validator(mode="after")
    def _tools_have_a_loop(self) -> RemoteEnvironment:
        if self.mcp_servers and self.protocol == "gymnasium":
            raise ValueError(
                "environment.mcp_servers is set, but environment.protocol is gymnasium, where the world answers all tool "
                "calls itself. Leave mcp_servers out, or set protocol to tools."
            )
        return self


class AgentEnvironment(Section):
    """An agent server (POST /run plays a whole rollout); it reaches the policy through a model server of its own."""

    kind: Literal["agent"]
    url: Url | None = None
    """Base URL of the agent server. Unset: it is looked up by `agent` at the head server."""
    head_server: Url | None = None
    """Base URL of a head server (/global_config_dict_yaml)."""
    head_token_variable: VariableName | None = None
    """Environment variable that holds the bearer token that the head server asks for, if it does."""
    head_token_file: str | None = None
    """File that holds it instead, such as a mounted secret."""
    agent: str | None = None
    """Instance name: what rows carry as `agent_ref.name`. A row that names another is refused."""
    tokens: Literal["items", "captured"] = "items"
    """Where token IDs come from: the items that the agent returns, or the model server's record of its calls."""
    model_server: Url | None = None
    """Base URL of the Roundhouse model server that recorded them; needed when `tokens` is `captured`."""
    model_server_token_variable: VariableName | None = None
    """Environment variable that holds the bearer token that it asks for, if it does."""
    model_server_token_file: str | None = None
    """File that holds it instead."""
    train_tasks: str
    """JSON lines file of training task rows."""
    heldout_tasks: str | None = None
    """JSON lines file of held-out task rows."""

    @model_validator(mode="before")
    @classmethod
    def _names_tokens(cls, tree: Any) -> Any:
        """Runs of earlier versions recorded `head_token: null`; a token itself was never a thing to record."""
        if not isinstance(tree, dict):
            return tree
        for key in ("head_token", "model_server_token"):
            if tree.get(key) is not None:
                raise ValueError(
                    f"environment.{key} would be written down with the configuration. Put the token into an environment "
                    f"variable and set environment.{key}_variable to its name, or into a file and set environment.{key}_file."
                )
        return {key: value for key, value in tree.items() if key not in ("head_token", "model_server_token")}

    @model_validator(mode="after")
    def _reachable(self) -> AgentEnvironment:
        if self.url is None and (self.head_server is None or self.agent is None):
            raise ValueError(
                "environment.url is unset: give the agent server's URL, or head_server and agent, by which it is looked up."
            )
        if self.tokens == "captured" and self.model_server is None:
            raise ValueError(
                "environment.tokens is captured, which reads the model server's records: set environment.model_server to "
                "its URL, or tokens to items."
            )
        return self
