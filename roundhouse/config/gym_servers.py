"""Our agent server, resources server and model server as instances of a NeMo Gym configuration.

Invariants: every wait, retry and record has a limit. Unknown fields are refused, except fields that NeMo Gym adds to
every server (`INSTANCE_FIELDS`), so one configuration serves both. Secrets (`api_key`, header values, `capture_token`)
are hidden when the configuration is printed. The model server has the field names of NeMo Gym's `vllm_model`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator

from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.section import PositiveFloat, PositiveInt, Section

HEAD_VARIABLE = "ROUNDHOUSE_GYM_HEAD"
"""Environment variable with the URL of the head server of the run's own servers."""
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


class ModelServerConfig(Section):
    """A model server in front of one or more inference engines."""

    model_config = ConfigDict(hide_input_in_errors=True)

    base_url: Annotated[
        list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value), Field(min_length=1)
    ]
    """OpenAI base URL of each engine (a URL or a list of them): chat is at `<base_url>/chat/completions`. A URL without any
    path gets `/v1`. Health and error texts show it: secrets belong to the fields below."""
    api_key: SecretStr = SecretStr("")
    """Sent to the engines as a bearer token; empty sends none."""
    model: str = "policy"
    """Name of the model at the engines, which replaces the callers' name."""
    return_token_id_information: bool = True
    """Ask the engines for token IDs and log-probabilities, and put them on the replies' last items."""
    request_prompt_and_generation_token_ids: bool = False
    """Also ask vLLM for token IDs next to the message (`return_token_ids`)."""
    uses_reasoning_parser: bool = True
    """The engine or the model separates reasoning: think blocks become reasoning items and are cut out of the history."""
    uses_interleaved_reasoning: bool = True
    """Send the history's reasoning to the engine in separate fields (`reasoning_content` and `reasoning`)."""
    preserve_reasoning_in_assistant_content: bool = False
    """Leave think blocks in the history's content."""
    replace_developer_role_with_system: bool = False
    """Send developer messages as system messages."""
    sequential_reasoning_allowed: bool = True
    """False: a conversation whose last assistant turn held only reasoning ends with content_filter, without a
    request."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template; those in a request's metadata win."""
    sampling_overrides: dict[str, Any] | None = None
    """Sampling parameters of every engine call, with precedence over the caller and `extra_body`."""
    extra_body: dict[str, Any] | None = None
    """More fields of the engine call; those in a request's metadata win, and the request's own fields win over both."""
    default_headers: Annotated[dict[str, str], Field(repr=False)] = Field(default_factory=dict)
    """More headers of the engine call."""
    is_responses_native: Literal[False] = False
    """Not supported: the engine is always asked for chat completions."""
    use_completions_api: Literal[False] = False
    """Not supported: base models without a chat template."""
    render_chat_template: Literal[False] = False
    """Not supported: the engine renders the chat template."""
    tokenizer: None = None
    """Not supported: the engine tokenises."""
    audio_root: None = None
    """Not supported: audio comes in the request (`metadata.audio_data`), not from this server's files."""

    request_timeout_seconds: PositiveFloat = 600
    """Time limit of one call, all its attempts together."""
    connect_timeout_seconds: PositiveFloat = 5
    """Time limit to reach an engine, and of a health check."""
    max_attempts: PositiveInt = 4
    """Engine calls for one request at most; only calls that an engine cannot have answered are repeated."""
    outage_wait_seconds: Annotated[float, Field(ge=0)] = 5
    """Time that a request waits for an engine if all are down, before it is answered 503."""
    health_check_seconds: PositiveFloat = 2
    """Pause between health checks of an engine (GET /health)."""
    max_sessions: PositiveInt = 100_000
    """Sessions whose engine is remembered; the longest unused is forgotten first."""

    capture_all: bool = False
    """Record the token IDs of every call under /ng-rollout/<id>, not only of calls that request it in their path."""
    capture_continues: bool = True
    """Send the engine the recorded tokens of a captured rollout's history if the agent repeats it word for word, so
    that the next prompt continues them exactly although the agent echoes no token IDs."""
    capture_token: SecretStr | None = None
    """Bearer token that GET and DELETE /captures want. Unset: they answer callers on this machine only."""
    capture_max_calls: PositiveInt = 100_000
    """Recorded calls kept in memory; the oldest rollouts go first, and are then reported as incomplete."""
    capture_max_mebibytes: PositiveInt = 1024
    """Memory for recorded calls, in MiB."""
    capture_max_age_seconds: PositiveFloat = 7200
    """A rollout's record goes when it was not added to for this long."""

    @field_validator("base_url")
    @classmethod
    def _openai_base(cls, urls: list[str]) -> list[str]:
        checked = []
        for url in urls:
            parts = urlsplit(url.rstrip("/"))
            if "@" in parts.netloc:
                raise ValueError(
                    "a base URL holds no user and password: give a secret as api_key or in default_headers"
                )
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not an http(s) URL, such as http://127.0.0.1:8000/v1")
            checked.append(urlunsplit(parts if parts.path else parts._replace(path="/v1")))
        return checked
