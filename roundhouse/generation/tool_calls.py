"""Tool calls in the text of a reply, read the same way for every engine.

Invariants: only a call after the policy's thought counts; a call in a thought is a draft. A valid call is kept, even
next to broken ones. A broken call becomes a call with its text and tag as arguments. This is not JSON, so every
agent answers it with a tool error that the policy sees.

    <think>Shall I write <tool_call>{"name": "delete"}</tool_call>? No.</think>
    <tool_call>{"name": "now"}</tool_call>                            now({})
    <tool_call>{"name": "add", "arguments": {"a": }}</tool_call>      add(<tool_call>{"name": "add", "arguments": {"a": }})

A thought is `<think>…</think>`; all text before an unopened `</think>` (the generation prompt may have opened it); all
text after an unclosed `<think>`. A tag inside the JSON of a valid call is text. `<tool_call>` without a JSON object
after it and without `</tool_call>` is a mention of the tag.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

TOOL_CALL_START = "<tool_call>"
TOOL_CALL_END = "</tool_call>"
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
THOUGHTS = (
    (THOUGHT_START, THOUGHT_END),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
)
"""Begin and end of a thought in the formats of vLLM's parsers."""
MAX_CALLS = 64
"""Calls of one reply that are read. The rest of the reply is one broken call, which reports the bound to the policy."""
NAMELESS = "invalid_tool_call"
"""Name of a broken call in which no name can be read."""

_TAG = re.compile("|".join(map(re.escape, (TOOL_CALL_START, TOOL_CALL_END, THOUGHT_START, THOUGHT_END))))
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')
_DECODER = json.JSONDecoder()

ToolCalls = list[dict[str, Any]]
ToolParser = Callable[[str, list[dict[str, Any]]], tuple[str | None, ToolCalls]]
"""Generated text and the request's tools, to the content before the calls and the calls in OpenAI's shape."""


def parse_hermes(text: str, tools: list[dict[str, Any]]) -> tuple[str | None, ToolCalls]:
    """Read calls in the Hermes format, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    A call without arguments has `{}`. Llama's key `parameters` is read as `arguments`.

    Returns:
        The text before the first call (None if empty) and the calls; the whole text without calls.
    """
    calls: ToolCalls = []
    first = position = 0
    while (tag := _TAG.search(text, position)) is not None:
        position = tag.end()
        match tag.group():
            case "<think>":
                end = text.find(THOUGHT_END, position)
                if end < 0:
                    break
                position = end + len(THOUGHT_END)
            case "</think>":
                calls = []
            case "<tool_call>":
                call, position = _call_at(text, position)
                if call is None:
                    continue
                first = first if calls else tag.start()
                if len(calls) == MAX_CALLS:
                    calls.append(_broken(text[tag.start() :]))
                    break
                calls.append(call)
    return (text[:first] or None, calls) if calls else (text, [])


def _call_at(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """Return the call whose tag ends at `start`, None for a mention of the tag, and the position after it."""
    begin = _after_space(text, start)
    value, end = None, begin
    if text.startswith("{", begin):
        with suppress(ValueError, RecursionError):
            value, end = _DECODER.raw_decode(text, begin)
    closing = _TAG.match(text, _after_space(text, end))
    if value is None or (closing is None and text[end:].strip()):  # no JSON, or more than JSON
        closing = next((tag for tag in _TAG.finditer(text, start) if "tool_call" in tag.group()), None)
        value, end = None, len(text) if closing is None else closing.start()
    closed = closing is not None and closing.group() == TOOL_CALL_END
    after = closing.end() if closing is not None and closed else end
    call = None if value is None else _good_call(value)
    if call is None and (closed or text.startswith("{", begin)):
        call = _broken(text[start - len(TOOL_CALL_START) : end])
    return call, start if call is None else after


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "it matches everywhere"
    return match.end()


def _good_call(value: Any) -> dict[str, Any] | None:
    """The call of a JSON value; None if it is not a call, or holds a lone surrogate, which JSON does not carry."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {})
    written = json.dumps(arguments, ensure_ascii=False)
    try:
        (name + written).encode()
    except UnicodeEncodeError:
        return None
    return tool_call(name, written)


def _broken(text: str) -> dict[str, Any]:
    name = _NAME.search(text)
    return tool_call(NAMELESS if name is None else name.group(1), text)


def bounded(calls: ToolCalls) -> ToolCalls:
    """The calls of another parser; all beyond `MAX_CALLS` as one broken call."""
    if len(calls) <= MAX_CALLS:
        return calls
    rest = [call["function"] for call in calls[MAX_CALLS:]]
    text = "".join(f"{TOOL_CALL_START}{json.dumps(function)}{TOOL_CALL_END}" for function in rest)
    return [*calls[:MAX_CALLS], tool_call(rest[0]["name"], text)]


def broken_call_problem(arguments: str) -> str | None:
    """Return the reason why a call with these arguments is broken, for the policy to read; None for a good call."""
    if not arguments.startswith(TOOL_CALL_START):
        return None
    body = arguments[len(TOOL_CALL_START) :]
    problem = 'a call is {"name": …, "arguments": {…}}'
    try:
        beyond = _good_call(json.loads(body)) is not None
    except (ValueError, RecursionError) as error:
        beyond, problem = TOOL_CALL_END in body, str(error)
    return f"not run, since a reply may hold {MAX_CALLS} tool calls" if beyond else problem


def thought_end(text: str) -> int:
    """Return the position after the last thought of `text`: 0 without a thought, the length of a text with an open
    thought."""
    closed = max((text.rfind(end) + len(end) for _, end in THOUGHTS if end in text), default=0)
    return len(text) if any(text.rfind(start) >= closed for start, _ in THOUGHTS) else closed


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A call in OpenAI's shape with a fresh id, of the nine letters and digits that Mistral's templates demand."""
    return {
        "id": uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
