"""Tool calls out of generated text, in Hermes' notation: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Invariant: a text that is not wholly well-formed calls stays text: no call is guessed, none is dropped. This is the reading of
vLLM's hermes parser, for engines that bring no parser of their own.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
TOOL_CALL_START = "<tool_call>"

ToolCalls = list[dict[str, Any]]
ToolParser = Callable[[str, list[dict[str, Any]]], tuple[str | None, ToolCalls]]
"""Generated text and the request's tools, to the content before the calls and the calls in OpenAI's shape."""


def parse_hermes(text: str, tools: list[dict[str, Any]]) -> tuple[str | None, ToolCalls]:
    """The text before the first call (None when empty) and the calls in OpenAI's shape."""
    if TOOL_CALL_START not in text:
        return text, []
    calls: ToolCalls = []
    for closed, unclosed in _CALL.findall(text):
        try:
            call = json.loads(closed or unclosed)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return text, []
        calls.append(tool_call(name, json.dumps(arguments, ensure_ascii=False)))
    return text[: text.index(TOOL_CALL_START)] or None, calls


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A call in OpenAI's shape with a fresh id."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
