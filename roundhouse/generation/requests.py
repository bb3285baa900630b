"""What a chat-completion request may say, read by hand because this is the hot path.

Invariant: every field of a request is honoured, or the request is refused in words: a field that would change the distribution
behind the trainer's back (penalties, stop strings, forced tools, logit biases) cannot be ignored, nor can one that nobody here
knows. So the log-probabilities returned are those of the policy under temperature, top_p and top_k. Any field may be null or
have the value that changes nothing (`NEUTRAL`); those that only describe the request (`DESCRIPTIVE`) say nothing to an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roundhouse.errors import DataError
from roundhouse.generation.engine import Draw
from roundhouse.generation.protocol import TOKEN_FIELDS


class BadRequest(DataError):
    """The request cannot be answered as it stands: HTTP 400, or what `status` says."""

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


READ = frozenset(
    {
        "model",
        "messages",
        "tools",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "chat_template_kwargs",
        "reasoning_effort",
        "required_prefix_token_ids",
        "parallel_tool_calls",
        "logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
    }
)
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
    """The choice tells log-probabilities in OpenAI's form. The message has them either way."""
    required_prefix: list[int] | None = None
    """Token IDs that the prompt must begin with, up to the newest assistant message; None takes those that it carries."""


def read_request(body: Any, model: str) -> ChatRequest:
    """Check a request's JSON.

    Raises:
        BadRequest: names the field and what it may be.
    """
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    named = body.get("model", model)
    if named != model:
        raise UnknownModel(f"The model {named!r} is not served here; the only one is {model!r}.", "model")
    for key, value in body.items():
        if key in READ or key in DESCRIPTIVE or value is None:
            continue
        shown = f"{key}={value!r}" if len(repr(value)) <= 200 else key
        if key not in NEUTRAL:
            raise BadRequest(f"{shown} is not supported: this engine has no such field. Leave it out.", key)
        if value not in NEUTRAL[key]:
            raise BadRequest(f"{shown} is not supported; leave it out or send {NEUTRAL[key][-1]!r}.", key)
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=_tools(body),
        draw=_draw(body),
        model=model,
        template_arguments=_template_arguments(body),
        only_first_call=_flag(body, "parallel_tool_calls", default=True) is False,
        # Who asks for tokens as IDs reads them, and their log-probabilities, in the message.
        logprobs=_flag(body, "logprobs") and not _flag(body, "return_tokens_as_token_ids"),
        required_prefix=_required_prefix(body),
    )


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


def _template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """What the chat template is given besides messages and tools; `reasoning_effort` is one of them."""
    value = body.get("chat_template_kwargs") or {}
    if not isinstance(value, dict):
        raise BadRequest("chat_template_kwargs must be an object.", "chat_template_kwargs")
    effort = body.get("reasoning_effort")
    return value if effort is None else {"reasoning_effort": effort, **value}


def _required_prefix(body: dict[str, Any]) -> list[int] | None:
    prefix = body.get("required_prefix_token_ids") or None
    if prefix is None:
        return None
    if not isinstance(prefix, list) or {*map(type, prefix)} != {int}:
        raise BadRequest("required_prefix_token_ids must be a list of whole numbers.", "required_prefix_token_ids")
    if all(message.get("role") != "assistant" for message in body["messages"]):
        raise BadRequest(
            "required_prefix_token_ids continues an assistant message, and there is none.", "required_prefix_token_ids"
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


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRequest(f"messages[{index}] must be an object with a role among {sorted(ROLES)}.", "messages")
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            readable = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
        else:
            readable = content is None or isinstance(content, str)
        if not readable:
            raise BadRequest(f"messages[{index}].content must be text, or a list of text parts.", "messages")
        if calls is not None and not (
            isinstance(calls, list)
            and all(
                isinstance(call, dict) and isinstance(call.get("function"), dict) and "name" in call["function"]
                for call in calls
            )
        ):
            raise BadRequest(f"messages[{index}].tool_calls must be a list of function calls.", "messages")
        if any(message.get(key) is not None for key in TOKEN_FIELDS):
            _check_token_fields(index, message)
    return messages


def _check_token_fields(index: int, message: dict[str, Any]) -> None:
    """All three or none, with lengths that fit. What they may hold is checked against the vocabulary when they are used."""
    lists = [message.get(key) for key in TOKEN_FIELDS]
    if not all(isinstance(value, list) for value in lists):
        raise BadRequest(f"messages[{index}] must carry all of {', '.join(TOKEN_FIELDS)}, or none.", "messages")
    prompt, generation, log_probs = lists
    if len(generation or []) != len(log_probs or []):
        raise BadRequest(
            f"messages[{index}] has {len(generation or [])} generated tokens and {len(log_probs or [])} log-probabilities.",
            "messages",
        )
    if not {*map(type, prompt or []), *map(type, generation or [])} <= {int}:
        raise BadRequest(f"messages[{index}]: token IDs must be whole numbers.", "messages")
