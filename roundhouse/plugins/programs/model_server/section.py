"""The configuration of the model server, through which agents and programs call the policy.

Invariants: every wait, retry and record has a limit. Secrets (`api_key`, header values, `capture_token`) are hidden when the
configuration is printed. The fields have the names of NeMo Gym's `vllm_model`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, field_validator

from roundhouse.config.section import PositiveFloat, PositiveInt, Section


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
