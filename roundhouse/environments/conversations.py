"""The pieces of conversations: chat messages of demonstrations, and what a verifier reads of a response.

Invariant: an answer counts only when the rollout ended with it. Text beside a tool call is not a final answer.
"""

from __future__ import annotations

import json
from typing import Any

from roundhouse.environments.base import final_text

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    """The assistant answers in words."""
    return {"role": "assistant", "content": text}


def calls(name: str, call_id: str, **arguments: Any) -> Message:
    """The assistant calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def returns(call_id: str, text: str) -> Message:
    """The tool answers the call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def closing_text(response: dict[str, Any]) -> str | None:
    """The text with which the rollout ended; None when it ended with something else, such as a tool call."""
    output = response.get("output", [])
    if not output or output[-1].get("type") != "message":
        return None
    return final_text(response)
