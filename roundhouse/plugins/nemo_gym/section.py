"""The sections of environments behind NeMo Gym's contracts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from roundhouse.config.environments import EnvironmentTraits, FileEnvironment, McpServers, has_rows
from roundhouse.config.secrets import VariableName
from roundhouse.config.section import Code, Endpoint, Operational, PositiveFloat, SecretFile, Url

OWN_LIMITS = ("max_turns", "max_tokens", "system_prompt", "parallel_tool_calls")
NEMO_GYM = EnvironmentTraits(
    servers="roundhouse.plugins.nemo_gym.owned:owned_servers",
    check_pods="roundhouse.plugins.nemo_gym.owned:refuse_unfit_pods",
)
REMOTE = EnvironmentTraits(addresses="roundhouse.plugins.nemo_gym.addresses:of_resources_server")
AGENT = EnvironmentTraits(addresses="roundhouse.plugins.nemo_gym.addresses:of_agent_server")


class RemoteEnvironment(FileEnvironment):
    """A resources server reached by URL; the agent loop runs in the collector."""

    kind: Literal["remote"]
    url: Endpoint[str]
    """Base URL of the resources server."""
    protocol: Literal["tools", "gymnasium"] = "tools"
    """`tools`: /seed_session, /<tool>, /verify. `gymnasium`: /reset, /step and, if offered, /close."""
    close_route: Annotated[str, Field(pattern=r"^/[\w./-]+$")] | None = None
    """Route that ends a session, such as /end_session, if the server has one but does not offer it in its answers."""
    mcp_servers: McpServers = Field(default_factory=dict)
    """Additional MCP servers (streamable HTTP), URL by name. The policy sees their tools as `mcp__<name>__<tool>`."""
    session_mcp: bool = True
    """Offer the policy the MCP tools in the server's answer to /seed_session, except tools that the row already has. False
    ignores the offer and saves a connection per rollout."""
    restore: Operational[Literal["none", "replay"]] = "none"
    """Treatment of a rollout that was interrupted between two model calls. `none`: it restarts. `replay`: its finished model
    calls are kept, and its tool calls (or steps) are repeated in order on a new session; if an answer differs, it restarts.
    Set `replay` only if the server always gives the same answers and repeated calls change nothing outside the session."""

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

    def elsewhere(self) -> str:
        return _in_a_server(self.kind, self.url)

    def has_heldout(self, read: bool) -> bool | None:
        return has_rows(self.train_tasks, self.heldout_tasks, read)


class AgentEnvironment(FileEnvironment):
    """An agent server (POST /run plays a whole rollout); it reaches the policy through a separate model server."""

    has_own_loop: ClassVar[bool] = True
    own_limits: ClassVar[tuple[str, ...]] = OWN_LIMITS
    sends_requests: ClassVar[bool] = True
    kind: Literal["agent"]
    url: Url | None = None
    """Base URL of the agent server. Unset: it is looked up by `agent` at the head server."""
    head_server: Url | None = None
    """Base URL of a head server (/global_config_dict_yaml)."""
    head_token_variable: VariableName | None = None
    """Environment variable with the bearer token for the head server, if it needs one."""
    head_token_file: SecretFile | None = None
    """File with this token, such as a mounted secret."""
    agent: str | None = None
    """Instance name, the `agent_ref.name` of rows. A row with another name is refused."""
    tokens: Literal["items", "captured"] = "items"
    """Source of token IDs: the items that the agent returns, or the model server's record of its calls."""
    model_server: Url | None = None
    """Base URL of the Roundhouse model server that recorded the calls; needed when `tokens` is `captured`."""
    model_server_token_variable: VariableName | None = None
    """Environment variable with the bearer token for this server, if it needs one."""
    model_server_token_file: SecretFile | None = None
    """File with this token."""

    @model_validator(mode="before")
    @classmethod
    def _names_tokens(cls, tree: Any) -> Any:
        """Drop `head_token: null` from recorded runs of earlier versions."""
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
                "environment.url is unset: give the agent server's URL, or head_server and agent to look it up."
            )
        if self.tokens == "captured" and self.model_server is None:
            raise ValueError(
                "environment.tokens is captured, which reads the model server's records: set environment.model_server to "
                "its URL, or tokens to items."
            )
        return self

    def elsewhere(self) -> str:
        return _in_a_server(self.kind, self.url)

    def has_heldout(self, read: bool) -> bool | None:
        return has_rows(self.train_tasks, self.heldout_tasks, read)


class NemoGymEnvironment(FileEnvironment):
    """NeMo Gym's servers. The run starts them with its engine as their model, watches them, and stops them at the end. The
    agent named in each row (`agent_ref.name`) plays it."""

    has_own_loop: ClassVar[bool] = True
    own_limits: ClassVar[tuple[str, ...]] = OWN_LIMITS
    sends_requests: ClassVar[bool] = True
    kind: Literal["nemo_gym"]
    config_paths: Code[Annotated[tuple[str, ...], Field(min_length=1)]]
    """NeMo Gym's configuration files, as for `roundhouse gym start`."""
    overrides: Code[tuple[str, ...]] = ()
    """Further settings: `+key=value`, `++key=value`, `key=value`, `~key`."""
    agent: str | None = None
    """Agent of rows without one. Unset: the only configured agent."""
    ours: bool = True
    """Replace NeMo Gym's agent and model servers by Roundhouse's servers with the same contract."""
    search_dirs: Code[tuple[str, ...]] = ()
    """First directories for relative paths."""
    python: Code[str | None] = None
    """One interpreter for all foreign servers, instead of a virtual environment for each."""
    start_timeout_seconds: Operational[PositiveFloat] = 300
    """Time limit until all servers answer, before the first iteration."""
    restarts: Operational[Annotated[int, Field(ge=0)]] = 3
    """Maximum number of restarts of each server that ended unexpectedly."""

    def elsewhere(self) -> str:
        return (
            f"environment.kind is nemo_gym ({', '.join(self.config_paths)}): its tasks, tools and verifiers are in the servers "
            "that the run starts. These have no demonstrations. Set policy.kind to pretrained."
        )


def _in_a_server(kind: str, url: str | None) -> str:
    return (
        f"environment.kind is {kind} ({url}): its tasks, tools and verifier live in that server and cannot be loaded into this "
        "process. Reach it over HTTP for rollouts; where an environment must be in process (a warm_start policy, serving it "
        "yourself), set environment.kind to calculator, sort, another built-in kind, or custom."
    )
