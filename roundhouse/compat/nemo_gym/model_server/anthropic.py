"""Anthropic's Messages dialect, to a Responses body and back; pure functions.

Invariant: a conversation says the same in both dialects: system text, user and assistant texts, thinking, tool calls with
their results, images. Unknown top-level fields are ignored, since clients of this dialect send many; a block that has no form
in the other dialect is refused. Token fields have no place in this dialect.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import orjson

from roundhouse.environments.openai_requests import Body, invalid

_STOP_REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def responses_body(body: Any) -> Body:
    """The Responses body that asks the same.

    Raises:
        InvalidRequest: something in it has no form there.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise invalid(["messages"], "a list of messages is required")
    try:
        asked: Body = {"input": [item for message in body["messages"] for item in _items(message)]}
        asked |= _parameters(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise invalid(["messages"], f"malformed: {error!r}") from error
    return asked


def _parameters(body: Body) -> Body:
    params: Body = {}
    system = body.get("system")
    if system and not isinstance(system, str):
        system = "\n".join(block["text"] for block in system if block.get("type") == "text" and block.get("text"))
    names = {"model": "model", "max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}
    params |= {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
    if system:
        params["instructions"] = system
    if body.get("tools"):
        params["tools"] = [_tool(tool) for tool in body["tools"]]
    if (choice := body.get("tool_choice")) is not None:
        params["tool_choice"] = _tool_choice(choice)
    return params


def _tool(tool: Body) -> Body:
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": schema,
        "strict": False,
    }


def _tool_choice(choice: Body) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "name": choice["name"]}
    if choice.get("type") not in _TOOL_CHOICES:
        raise invalid(
            ["tool_choice"], f"type {choice.get('type')!r} is none of {sorted(_TOOL_CHOICES)} and tool", choice
        )
    return _TOOL_CHOICES[choice["type"]]


def _items(message: Body) -> list[Body]:
    """One message as items: texts and images that stand together are one message item, each other block is one."""
    role, content = message["role"], message.get("content") or ""
    if isinstance(content, str):
        return [{"type": "message", "role": role, "content": content}]
    items: list[Body] = []
    parts: list[Body] = []

    def flush() -> None:
        if parts:
            items.append({"type": "message", "role": role, "content": list(parts)})
            parts.clear()

    for block in content:
        if block.get("type") in ("text", "image"):
            parts.append(_part(block))
        elif block.get("type") == "redacted_thinking":
            continue  # it holds nothing that could be shown
        else:
            flush()
            items.append(_item(block))
    flush()
    return items


def _part(block: Body) -> Body:
    if block["type"] == "text":
        return {"type": "input_text", "text": block["text"]}
    source = block["source"]
    if source.get("type") == "url":
        return {"type": "input_image", "image_url": source["url"], "detail": "auto"}
    url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def _item(block: Body) -> Body:
    kind = block.get("type")
    if kind == "thinking":
        summary = [{"type": "summary_text", "text": block.get("thinking") or ""}]
        return {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": summary}
    if kind == "tool_use":
        # With the spaces that most models write, so that a re-rendered call looks like a generated one.
        arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
        return {
            "type": "function_call",
            "id": block["id"],
            "call_id": block["id"],
            "name": block["name"],
            "arguments": arguments,
        }
    if kind == "tool_result":
        return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": _result_text(block)}
    raise invalid(["messages"], f"a content block of type {kind!r} cannot be shown to the policy", block)


def _result_text(block: Body) -> str:
    content = block.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise invalid(["messages"], "a tool_result holds something else than text", block)
    return "\n".join(part["text"] for part in content)


def message_object(response: Body, model: str) -> Body:
    """A Responses object as Anthropic's message."""
    content = [block for item in response["output"] for block in _blocks(item)]
    reason = str((response.get("incomplete_details") or {}).get("reason"))
    called = any(block["type"] == "tool_use" for block in content)
    usage = response.get("usage") or {}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _STOP_REASONS.get(reason) or ("tool_use" if called else "end_turn"),
        "stop_sequence": None,
        "usage": {"input_tokens": usage.get("input_tokens", 0), "output_tokens": usage.get("output_tokens", 0)},
    }


def _blocks(item: Body) -> list[Body]:
    if item["type"] == "reasoning":
        return [{"type": "thinking", "thinking": part["text"], "signature": ""} for part in item["summary"]]
    if item["type"] == "function_call":
        return [{"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": _input(item["arguments"])}]
    return [{"type": "text", "text": part["text"]} for part in item["content"]]


def _input(arguments: str) -> Body:
    """The arguments as the object that this dialect wants; what is none stands under `invalid_arguments`, for the agent's
    tool to refuse in its own words."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": arguments}
