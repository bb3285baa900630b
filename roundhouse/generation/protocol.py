"""Contracts around the policy: the call of an agent, the fields of a request, and the engine behind the server.

`PolicyClient.complete` takes a conversation and returns the policy's next message with the exact token IDs. Prefix
continuation: if an assistant message carries the three token fields (`prompt_token_ids`, `generation_token_ids`,
`generation_log_probs`), this call's prompt begins with exactly `prompt_token_ids + generation_token_ids` of the newest
such message.

`Engine`: token IDs in, token IDs and log-probabilities out. Invariant: an engine holds exactly one whole set of
weights, or none, or is poisoned. `load_weights` ends with the new weights whole and verified, or raises:
`WeightsRefused` if the engine still holds its old weights, anything else if it may hold a mixture and must be
restarted. A `generate` that outlives its weights ends with the versions that generated its tokens, with
`GenerationAborted`, or with `WeightsLost` if others can load weights. Text, chat templates and tools belong to
`chat.py`.

`read_request` is the engine's reader of chat completions, written by hand because token arrays must not be copied.
Invariant: every field is honoured, or the request is refused with a message: a field that changes the distribution
(penalties, stop strings, forced tools, logit biases) must not be ignored. Log-probabilities are therefore the policy's
under temperature, top_p and top_k. Fields may be null or neutral (`NEUTRAL`); descriptive ones (`DESCRIPTIVE`) are
ignored.

`check_chat` and `check_responses` are for a model server, which passes requests on. Invariant: `/v1/responses` refuses
unknown fields; an item carries all three token fields, of fitting lengths, or none. A refusal is a list of problems in
FastAPI's 422 form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

from pydantic import VERSION

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import Sampling
from roundhouse.errors import DataError, InfraError, RoundhouseError

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
SESSION_HEADER = "X-Session-Id"
"""Calls with the same value go to one replica, as long as it runs. The name is Ray Serve's default for it."""


def session_header(session: str) -> dict[str, str]:
    """The header of a session's calls, ASCII without white space whatever the session is called. Of a rollout's id the number
    of the sample stays at the end, by which proxies spread the samples of a group over the replicas."""
    return {SESSION_HEADER: quote(session)}


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the policy."""

    message: dict[str, Any]
    """Assistant chat message: role, content (str or None), tool_calls (OpenAI shape, absent when none); no token fields."""
    finish_reason: str
    """stop, tool_calls or length."""
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    policy_version: int
    """The oldest version that drew any of the tokens."""
    latency_seconds: float
    version_spans: list[dict[str, int]] | None = None
    """`[{"version": 3, "tokens": 17}, …]` in order, if a refit came in between; None: all tokens are
    `policy_version`'s."""


class PolicyClient(Protocol):
    """Anything that answers a conversation: the HTTP client of the served engine, or a scripted one in a test."""

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """Answer `messages` (chat shape; tools in chat shape).

        Raises:
            ContextOverflow: the prompt leaves no room to generate.
            EngineRejected: the engine refuses the request (4xx): a data failure.
            EngineUnreachable, EngineTimeout, EngineFailed, BadReply: infrastructure failures.
        """
        ...


@runtime_checkable
class ReplicatedPolicy(PolicyClient, Protocol):
    """A policy of several replicas, each with a separate prefix cache."""

    def for_rollout(self, rollout_id: str) -> PolicyClient:
        """The same policy, for the calls of one rollout: they go to one replica as long as it runs, then to another one."""
        ...


def policy_of(rollout_id: str, policy: PolicyClient) -> PolicyClient:
    """The policy for the calls of one rollout, of whichever kind it is."""
    return policy.for_rollout(rollout_id) if isinstance(policy, ReplicatedPolicy) else policy


class EngineUnreachable(InfraError):
    """The engine cannot be reached, is full, or is refitting beyond its time limit."""


class EngineFailed(InfraError):
    """An engine answered with an internal failure, mostly 500: the engine or the request is defective."""


class BadReply(InfraError):
    """An engine answered 200 with something else than the chat completion that was asked for."""


class EngineTimeout(InfraError):
    """The engine did not answer within the time limit."""


class EngineRejected(DataError):
    """The engine refused the request."""


class ContextOverflow(EngineRejected):
    """The conversation does not fit the model's context. The rollout is truncated, not failed."""


AsgiApp = Callable[[dict[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling of one answer's tokens, and the images that it answers."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens. None draws from the engine's own state."""
    images: tuple[bytes, ...] = ()
    """Image files of the prompt, one for each run of placeholders (`roundhouse.images`)."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer in tokens. The end-of-turn token, when one was drawn, is the last of `token_ids`."""

    token_ids: list[int]
    log_probs: list[float]
    """Natural logarithms under the sampling distribution, one a token; empty for an engine without log-probabilities:
    its answers are not trained on."""
    finish_reason: str
    """stop or length."""
    versions: list[tuple[int, int]] | None = None
    """(policy version, tokens that it drew), in order; None: the engine does not report it, and held one version throughout."""
    cached_tokens: int | None = None
    """Tokens of the prompt that its prefix cache held; None: the engine does not report it."""


class GenerationAborted(RoundhouseError):
    """New weights came while the answer was drawn, and running generations were not to be kept: ask again."""


class WeightsRefused(DataError):
    """The weights are missing, damaged or of another model; the engine was not touched."""


class EnginePoisoned(RoundhouseError):
    """The engine holds a mixture of weights or has died. Only a restart helps."""


class WeightsLost(EnginePoisoned):
    """The engine answers by other weights than it was given. Loading them again helps."""


class Engine(Protocol):
    """An inference engine of the chat server. All methods run on the server's event loop."""

    max_model_len: int
    """Prompt and generation together, in tokens."""

    async def start(self) -> None:
        """Become able to take weights. Called once, before anything else."""
        ...

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """Answer a prompt. Cancelling the call stops the generation."""
        ...

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Replace the weights by those of a Hugging Face directory. The caller admits no request in the meantime.

        Args:
            version: label of the tokens generated from now on.
            running: drain: the caller has waited until none runs. continue: running ones continue with the new weights,
                from the new weights' view of their tokens so far. restart: they end with `GenerationAborted`.
            keep_prefix_cache: keys and values computed by the old weights stay in use, also those of running
                generations.

        After a failure no earlier generation is running any more.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, each given those before it, at temperature 1."""
        ...

    async def sleep(self) -> None:
        """Release the memory of weights, keys and values. No generation runs, and none begins before `wake`."""
        ...

    async def wake(self) -> None:
        """Become able to take weights again; those of before are gone, and `load_weights` follows."""
        ...

    async def check_health(self) -> None:
        """Raise when the engine is dead."""
        ...

    def openai_app(self) -> AsgiApp | None:
        """The engine's own OpenAI routes, served for every path that is not ours."""
        ...

    def shutdown(self) -> None:
        """Release memory and processes."""
        ...


class BadRequest(DataError):
    """The request cannot be answered as it stands: HTTP 400, or `status`."""

    status = 400
    code = "invalid_request"

    def __init__(self, text: str, parameter: str | None = None) -> None:
        super().__init__(text)
        self.parameter = parameter


class ContextLengthExceeded(BadRequest):
    """The prompt leaves no room to generate."""

    code = "context_length_exceeded"

    def __init__(self, prompt: int, limit: int) -> None:
        super().__init__(
            f"The prompt has {prompt} tokens; this model's maximum context length is {limit} tokens, prompt and generation "
            "together. Shorten the conversation or raise generation.max_model_len.",
            "messages",
        )


class UnknownModel(BadRequest):
    status = 404
    code = "model_not_found"


READ = frozenset({
    "model", "messages", "tools", "temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens",
    "chat_template_kwargs", "reasoning_effort", "required_prefix_token_ids", "parallel_tool_calls", "logprobs",
    "return_token_ids", "return_tokens_as_token_ids",
})  # fmt: skip
"""Fields that are honoured. The last two ask for token IDs, which every answer carries in its message."""

DESCRIPTIVE = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"}
)
"""Fields about the request that no engine acts on."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "top_logprobs": (0,),
    "priority": (0,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "return_token_strs": (False,),
    "mm_processor_kwargs": ({},),
}
"""Fields with the values that change nothing; any other value is refused."""

NEUTRAL_SAMPLING: dict[str, Any] = {
    name: NEUTRAL[name][0]
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "min_tokens", "ignore_eos")
}
"""Fields that change the distribution beyond temperature, top_p and top_k. A request to a foreign server sets each of
them, because the server would fill in missing ones from the model's generation_config.json or its defaults, and the
trainer would compute another distribution."""
ALL_TOKENS = -1
"""Neutral `top_k`."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    draw: Draw
    """`max_tokens` of 0 asks for as many as fit."""
    model: str
    template_arguments: dict[str, Any] = field(default_factory=dict)
    only_first_call: bool = False
    """`parallel_tool_calls` is false: of several calls in a reply the message keeps the first, as with vLLM."""
    logprobs: bool = False
    """The choice has log-probabilities in OpenAI's form. The message has them either way."""
    required_prefix: list[int] | None = None
    """Token IDs that the prompt must begin with, up to the newest assistant message; None uses those of that message."""


def read_request(body: Any, model: str) -> ChatRequest:
    """Check a request's JSON.

    Raises:
        BadRequest: names the field and its allowed values.
    """
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    named = body.get("model", model)
    if named != model:
        raise UnknownModel(f"The model {named!r} is not served here; the only one is {model!r}.", "model")
    for key, value in body.items():
        if key in READ or key in DESCRIPTIVE or value is None:
            continue
        key_text = f"{key}={value!r}" if len(repr(value)) <= 200 else key
        if key not in NEUTRAL:
            raise BadRequest(f"{key_text} is not supported: this engine has no such field. Remove it.", key)
        if value not in NEUTRAL[key]:
            raise BadRequest(f"{key_text} is not supported; leave it out or send {NEUTRAL[key][-1]!r}.", key)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message.", "messages")
    for index, message in enumerate(messages):
        if problem := message_problem(message, strict=True) or token_problem(message, strict=True):
            raise BadRequest(f"messages[{index}]: {problem}.", "messages")
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise BadRequest("chat_template_kwargs must be an object.", "chat_template_kwargs")
    effort = body.get("reasoning_effort")
    return ChatRequest(
        messages=[_without_stream_index(message) for message in messages],
        tools=_tools(body),
        draw=_draw(body),
        model=model,
        template_arguments=arguments if effort is None else {"reasoning_effort": effort, **arguments},
        only_first_call=_flag(body, "parallel_tool_calls", default=True) is False,
        # Callers that request token IDs find them, with log-probabilities, in the message.
        logprobs=_flag(body, "logprobs") and not _flag(body, "return_tokens_as_token_ids"),
        required_prefix=_required_prefix(body),
    )


def _without_stream_index(message: Any) -> Any:
    """Remove the positions in the stream from a message's calls. Clients that join the parts of a streamed reply send them
    back, and a history with them would not be the recorded one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any("index" in call for call in calls):
        return message
    bare = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return {**message, "tool_calls": bare}


def _draw(body: dict[str, Any]) -> Draw:
    top_k = body.get("top_k")
    if top_k is not None and (type(top_k) is not int or top_k < -1):
        raise BadRequest(f"top_k is {top_k!r}; it must be a positive whole number, or -1 for none.", "top_k")
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise BadRequest(f"seed is {seed!r}; it must be a whole number from 0 to 2**63 - 1.", "seed")
    limit_key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    limit = body.get(limit_key)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise BadRequest(f"{limit_key} is {limit!r}; it must be a whole number above 0.", limit_key)
    return Draw(
        max_tokens=limit or 0,
        temperature=_number(body, "temperature", 0.0, 10.0),
        top_p=_number(body, "top_p", 1e-6, 1.0),
        top_k=top_k if top_k and top_k > 0 else None,
        seed=seed,
    )


def _number(body: dict[str, Any], key: str, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return 1.0
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadRequest(f"{key} is {value!r}; it must be a number from {low:g} to {high:g}.", key)
    return float(value)


def _flag(body: dict[str, Any], key: str, *, default: bool = False) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise BadRequest(f"{key} is {value!r}; it must be true or false.", key)
    return value


def _required_prefix(body: dict[str, Any]) -> list[int] | None:
    prefix = body.get("required_prefix_token_ids") or None
    if prefix is None:
        return None
    if not isinstance(prefix, list) or {*map(type, prefix)} != {int}:
        raise BadRequest("required_prefix_token_ids must be a list of whole numbers.", "required_prefix_token_ids")
    if all(message.get("role") != "assistant" for message in body["messages"]):
        raise BadRequest(
            "required_prefix_token_ids continues an assistant message, but the request has none.",
            "required_prefix_token_ids",
        )
    return prefix


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list.", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f'tools[{index}] must have the shape {{"type": "function", "function": {{"name": …}}}}.', "tools"
            )
    return [] if body.get("tool_choice") == "none" else tools


def message_problem(message: Any, *, strict: bool) -> str:
    """Return the fault of a chat message; empty if it is valid.

    Args:
        strict: as an engine renders it: known roles, text and images alone, calls with a name. Otherwise as a model
            server passes it on.
    """
    if not isinstance(message, dict):
        return "a message is an object"
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or (strict and role not in ROLES):
        return f"a message has a role among {sorted(ROLES)}"
    if not isinstance(content, str | list | None):
        return "content is text or a list of parts"
    parts = content if isinstance(content, list) else []
    images = [part for part in parts if strict and isinstance(part, dict) and part.get("type") == "image_url"]
    texts = [part for part in parts if not any(part is image for image in images)]
    if (images and role != "user") or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str if strict else str | None) for part in texts
    ):
        return (
            "parts of content are text parts, and image_url parts in messages of the user; videos and sound are not supported"
            if strict
            else "parts of content must be objects with a text in `text`"
        )
    if not all(isinstance(part.get("image_url"), dict) for part in images):
        return 'an image has the shape {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'
    if not isinstance(calls, list | None):
        return "tool_calls is a list"
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls or ()]
    if not all(isinstance(function, dict) and (not strict or "name" in function) for function in functions):
        return "tool_calls have a function each" + (" with a name" if strict else "")
    return ""


def token_problem(item: Mapping[str, Any], *, strict: bool = False) -> str:
    """Return the fault of a message's or item's token fields; empty if they are valid.

    Args:
        strict: token IDs must be integers; the vocabulary is checked on use. Log-probabilities may be missing, as from
            an engine over a text server.
    """
    present = [name for name in TOKEN_FIELDS if item.get(name) is not None]
    if not present:
        return ""
    if len(present) < len(TOKEN_FIELDS):
        return f"token fields come together: {', '.join(present)} without the rest of {', '.join(TOKEN_FIELDS)}"
    prompt, generation, log_probs = (item[name] for name in TOKEN_FIELDS)
    if not (isinstance(prompt, list) and isinstance(generation, list) and isinstance(log_probs, list)):
        return "token fields are lists of numbers"
    if len(generation) != len(log_probs) and (log_probs or not strict):
        return f"{len(generation)} generated tokens and {len(log_probs)} log-probabilities"
    if strict and not {*map(type, prompt), *map(type, generation)} <= {int}:
        return "token IDs must be whole numbers"
    return ""


Body = dict[str, Any]

RESPONSES_FIELDS: dict[str, tuple[type, ...]] = {
    "background": (bool,),
    "include": (list,),
    "input": (str, list),
    "instructions": (str,),
    "max_output_tokens": (int,),
    "max_tool_calls": (int,),
    "metadata": (dict,),
    "model": (str,),
    "parallel_tool_calls": (bool,),
    "previous_response_id": (str,),
    "prompt": (dict,),
    "reasoning": (dict,),
    "service_tier": (str,),
    "store": (bool,),
    "stream": (bool,),
    "temperature": (int, float),
    "text": (dict,),
    "tool_choice": (str, dict),
    "tools": (list,),
    "top_logprobs": (int,),
    "top_p": (int, float),
    "truncation": (str,),
    "user": (str,),
}
"""Each may be null, but for those of `_NEVER_NULL`."""

_NEVER_NULL = frozenset({"input", "parallel_tool_calls", "tool_choice", "tools"})

CHAT_FIELDS = frozenset({
    "messages", "model", "audio", "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens",
    "metadata", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty", "reasoning_effort",
    "response_format", "seed", "service_tier", "stop", "store", "temperature", "tool_choice", "tools", "top_logprobs",
    "top_p", "user", "web_search_options",
})  # fmt: skip
"""Fields that `/v1/chat/completions` passes on; others are ignored."""

_TYPE_NAMES = {
    bool: ("bool_type", "Input should be a valid boolean"),
    int: ("int_type", "Input should be a valid integer"),
    float: ("float_type", "Input should be a valid number"),
    str: ("string_type", "Input should be a valid string"),
    list: ("list_type", "Input should be a valid list"),
    dict: ("dict_type", "Input should be a valid dictionary"),
}


class InvalidRequest(DataError):
    """The request cannot be understood: HTTP 422."""

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in problems))
        self.problems = problems


def check_responses(body: Any) -> Body:
    """A `/v1/responses` body, unchanged.

    Raises:
        InvalidRequest: every problem found at the top level, or the first one of the items.
    """
    body = _object(body)
    problems = [
        _problem("extra_forbidden", [key], "Extra inputs are not permitted", body[key])
        for key in body.keys() - RESPONSES_FIELDS.keys()
    ]
    for key, value in body.items():
        types = RESPONSES_FIELDS.get(key)
        if types is not None and type(value) not in types and (value is not None or key in _NEVER_NULL):
            kind, text = _TYPE_NAMES[types[-1]]
            problems.append(_problem(kind, [key], text, value))
    if "input" not in body:
        problems.append(_problem("missing", ["input"], "Field required", body))
    if body.get("previous_response_id") is not None:
        problems.append(
            _value_error(
                ["previous_response_id"],
                "responses are not kept here; send the whole conversation in input",
                body["previous_response_id"],
            )
        )
    if problems:
        raise InvalidRequest(sorted(problems, key=lambda problem: str(problem["loc"])))
    if isinstance(body["input"], list):
        _check_items("input", body["input"])
    _check_objects("tools", body.get("tools") or ())
    if not body.get("tools") and body.get("tool_choice") == "required":
        raise InvalidRequest([_value_error(["tool_choice"], "'required' needs at least one tool", "required")])
    return body


def check_chat(body: Any) -> Body:
    """Return the fields of a `/v1/chat/completions` body that are passed on.

    Raises:
        InvalidRequest: messages are missing or malformed.
    """
    body = _object(body)
    if "messages" not in body:
        raise InvalidRequest([_problem("missing", ["messages"], "Field required", body)])
    messages = body["messages"]
    if not isinstance(messages, list):
        raise InvalidRequest([_problem("list_type", ["messages"], "Input should be a valid list", messages)])
    _check_items("messages", messages)
    for place, message in enumerate(messages):
        if problem := message_problem(message, strict=False):
            raise InvalidRequest([_value_error(["messages", place], problem, message)])
    return {key: value for key, value in body.items() if key in CHAT_FIELDS}


def _object(body: Any) -> Body:
    if not isinstance(body, dict):
        raise InvalidRequest([_problem("dict_type", [], "Input should be a valid dictionary", body)])
    return body


def _check_items(key: str, items: list[Any]) -> None:
    _check_objects(key, items)
    for place, item in enumerate(items):
        if problem := token_problem(item):
            raise InvalidRequest([_value_error([key, place], problem, None)])


def _check_objects(key: str, values: Iterable[Any]) -> None:
    for place, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidRequest([_problem("dict_type", [key, place], "Input should be a valid dictionary", value)])


def invalid(loc: list[Any], text: str, value: Any = None) -> InvalidRequest:
    """One problem, as an exception."""
    return InvalidRequest([_value_error(loc, text, value)])


def _value_error(loc: list[Any], text: str, value: Any) -> dict[str, Any]:
    return _problem("value_error", loc, f"Value error, {text}", value)


def _problem(kind: str, loc: list[Any], text: str, value: Any) -> dict[str, Any]:
    version = ".".join(VERSION.split(".")[:2])
    return {
        "type": kind,
        "loc": ["body", *loc],
        "msg": text,
        "input": value,
        "url": f"https://errors.pydantic.dev/{version}/v/{kind}",
    }
