"""What a call may say, checked by hand: token arrays are looked at once and never copied.

Invariant: a field that `/v1/responses` does not know is refused, not ignored; and an item carries all three token fields, of
fitting lengths, or none. A refusal is a list of problems in FastAPI's 422 shape.

    {"type": "extra_forbidden", "loc": ["body", "top_k"], "msg": "Extra inputs are not permitted", "input": 5, "url": …}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import VERSION

from roundhouse.errors import DataError
from roundhouse.generation.protocol import TOKEN_FIELDS

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

CHAT_FIELDS = frozenset(
    {
        "messages",
        "model",
        "audio",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "modalities",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
        "service_tier",
        "stop",
        "store",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "web_search_options",
    }
)
"""What `/v1/chat/completions` passes on; other fields are ignored."""

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
    problems += _wrong_types(body)
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
    """The fields of a `/v1/chat/completions` body that are passed on.

    Raises:
        InvalidRequest: there are no messages, or one is no message.
    """
    body = _object(body)
    if "messages" not in body:
        raise InvalidRequest([_problem("missing", ["messages"], "Field required", body)])
    messages = body["messages"]
    if not isinstance(messages, list):
        raise InvalidRequest([_problem("list_type", ["messages"], "Input should be a valid list", messages)])
    _check_items("messages", messages)
    for place, message in enumerate(messages):
        if problem := _message_problem(message):
            raise InvalidRequest([_value_error(["messages", place], problem, message)])
    return {key: value for key, value in body.items() if key in CHAT_FIELDS}


def _message_problem(message: Body) -> str:
    """What is wrong with a chat message; empty when nothing is."""
    if not isinstance(message.get("role"), str):
        return "a message has a role"
    content = message.get("content")
    if not isinstance(content, str | list | None):
        return "content is text or a list of parts"
    if isinstance(content, list) and not all(
        isinstance(part, dict) and isinstance(part.get("text"), str | None) for part in content
    ):
        return "parts of content are objects, whose text is text"
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        return "tool_calls is a list"
    if not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls or ()):
        return "tool_calls have a function each"
    return ""


def _object(body: Any) -> Body:
    if not isinstance(body, dict):
        raise InvalidRequest([_problem("dict_type", [], "Input should be a valid dictionary", body)])
    return body


def _wrong_types(body: Body) -> Iterable[dict[str, Any]]:
    for key, value in body.items():
        types = RESPONSES_FIELDS.get(key)
        if types is None or type(value) in types or (value is None and key not in _NEVER_NULL):
            continue
        kind, text = _TYPE_NAMES[types[-1]]
        yield _problem(kind, [key], text, value)


def _check_items(key: str, items: list[Any]) -> None:
    _check_objects(key, items)
    for place, item in enumerate(items):
        problem = _token_problem(item)
        if problem:
            raise InvalidRequest([_value_error([key, place], problem, None)])


def _check_objects(key: str, values: Iterable[Any]) -> None:
    for place, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidRequest([_problem("dict_type", [key, place], "Input should be a valid dictionary", value)])


def _token_problem(item: Mapping[str, Any]) -> str:
    """What is wrong with an item's token fields; empty when nothing is."""
    given = [name for name in TOKEN_FIELDS if item.get(name) is not None]
    if not given:
        return ""
    if len(given) < len(TOKEN_FIELDS):
        return f"token fields come together: {', '.join(given)} without the rest of {', '.join(TOKEN_FIELDS)}"
    prompt, generation, log_probs = (item[name] for name in TOKEN_FIELDS)
    if not (isinstance(prompt, list) and isinstance(generation, list) and isinstance(log_probs, list)):
        return "token fields are lists of numbers"
    if len(generation) != len(log_probs):
        return f"{len(generation)} generated tokens and {len(log_probs)} log-probabilities"
    return ""


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
