"""Replay whole answers as server-sent events, in the order and form of each dialect.

Invariant: the events of a stream add up to the answer of the same request without `stream`. The answer is computed
first, so retries and errors are the same with and without a stream.

Also convert requests of streaming clients of `/v1/responses` to the strict dialect. Invariant: the result passes the
strict check if the conversation can be shown. Such clients (coding agents on the command line) send bookkeeping fields,
hosted tools, tools grouped in namespaces, and other items; items that a chat engine does not accept are omitted, because
refusing them would end the rollout.

    tools: [{"type": "namespace", "name": "fs", "tools": [{"name": "read"}]}]
        ->  a function tool fs__read; its calls return as {"namespace": "fs", "name": "read"}
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

import orjson

from roundhouse.generation.protocol import RESPONSES_FIELDS, Body, invalid

Event = dict[str, Any]


def responses_events(response: Event) -> bytes:
    """Yield `response.created`, for each item added · text · done, then `response.completed` (also for an incomplete
    response, as its status shows)."""
    events: list[Event] = [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item.get("id")}
        shell = {
            key: value for key, value in item.items() if key in ("type", "id", "role", "call_id", "name", "namespace")
        }
        empty: dict[str, Event] = {
            "message": {"content": []},
            "reasoning": {"summary": []},
            "function_call": {"arguments": ""},
        }
        shell |= {"status": "in_progress", **empty.get(item["type"], {})}
        events.append({"type": "response.output_item.added", "output_index": index, "item": shell})
        if item["type"] == "message":
            for part, content in enumerate(item["content"]):
                text = {"content_index": part, "delta": content["text"]}
                events.append({"type": "response.output_text.delta", **place, **text})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    return _numbered([*events, {"type": "response.completed", "response": response}])


def responses_failure(text: str, code: str = "server_error") -> bytes:
    """Yield a stream that ends without an answer: `response.failed`."""
    response: Event = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "status": "failed",
        "output": [],
        "error": {"code": code, "message": text},
    }
    created = {**response, "status": "in_progress", "error": None}
    return _numbered(
        [{"type": "response.created", "response": created}, {"type": "response.failed", "response": response}]
    )


def chat_chunks(completion: Event, *, include_usage: bool) -> bytes:
    """Chunks of role, content and tool calls, the finish reason, on request the usage, then `[DONE]`. No token IDs."""
    shared = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = []
    for choice in completion["choices"]:
        message = choice["message"]
        deltas: list[tuple[Event, str | None]] = [({"role": "assistant"}, None)]
        if message.get("content"):
            deltas.append(({"content": message["content"]}, None))
        if message.get("tool_calls"):
            calls = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
            deltas.append(({"tool_calls": calls}, None))
        chunks += [
            {**shared, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": finish}]}
            for delta, finish in [*deltas, ({}, choice["finish_reason"])]
        ]
    if include_usage and completion.get("usage") is not None:
        chunks.append({**shared, "choices": [], "usage": completion["usage"]})
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def messages_events(message: Event) -> bytes:
    """Anthropic's events: `message_start`, for each block start · delta · stop, `message_delta`, `message_stop`."""
    events: list[Event] = [{"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}]
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        if kind == "tool_use":
            shell = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
        else:  # a thinking block's text is under "thinking", a text block's under "text"
            shell, delta = {"type": kind, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        events += [
            {"type": "content_block_start", "index": index, "content_block": shell},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    stop = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    usage = {"output_tokens": message["usage"]["output_tokens"]}
    events += [{"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}]
    return b"".join(map(_named, events))


def _numbered(events: list[Event]) -> bytes:
    return b"".join(_named({**event, "sequence_number": number}) for number, event in enumerate(events))


def _named(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


log = logging.getLogger(__name__)

_JOINT = "__"
_SHOWN = frozenset({"message", "reasoning", "function_call", "function_call_output"})

Namespaces = dict[str, tuple[str, str]]
"""Joined tool name to namespace and name."""


def strict_body(body: Any) -> tuple[Body, Namespaces]:
    """Return the body in the strict dialect, and the namespaces to restore with `with_namespaces`.

    Raises:
        InvalidRequest: it is not an object.
    """
    if not isinstance(body, dict):
        raise invalid([], "an object is required", body)
    namespaces: Namespaces = {}
    strict = {key: value for key, value in body.items() if key in RESPONSES_FIELDS and key != "stream"}
    input_items = strict.get("input")
    offered = list(strict.get("tools") or ())
    if isinstance(input_items, list):
        offered += [
            tool for item in input_items if _kind(item) == "additional_tools" for tool in item.get("tools") or ()
        ]
        strict["input"] = [_joined_call(item) for item in input_items if _kind(item) in _SHOWN]
        _warn_dropped(
            "items", [_kind(item) for item in input_items if _kind(item) not in _SHOWN | {"additional_tools"}]
        )
        # Make the leading system and developer messages one system message, as most chat templates admit no more
        items, texts = strict["input"], [strict.get("instructions") or ""]
        leading = 0
        while leading < len(items) and items[leading].get("role") in ("system", "developer"):
            content = items[leading].get("content") or ""
            texts.append(content if isinstance(content, str) else "".join(part.get("text") or "" for part in content))
            leading += 1
        if leading:
            strict["instructions"] = "\n\n".join(text for text in texts if text)
            strict["input"] = items[leading:]
    tools: list[Body] = []
    for tool in offered:
        if _kind(tool) == "namespace":
            for inner in tool.get("tools") or ():
                name = f"{tool.get('name')}{_JOINT}{inner.get('name')}"
                namespaces[name] = (str(tool.get("name")), str(inner.get("name")))
                tools.append({**inner, "type": "function", "name": name})
        elif _kind(tool) == "function" and tool.get("name"):
            tools.append(tool)
        else:
            _warn_dropped("tools", [_kind(tool)])
    if tools or "tools" in strict:
        strict["tools"] = tools
    return strict, namespaces


def with_namespaces(response: Body, namespaces: Namespaces) -> Body:
    """The response, with its calls of namespaced tools marked as such."""
    output = []
    for item in response["output"]:
        if item["type"] == "function_call" and item["name"] in namespaces:
            namespace, name = namespaces[item["name"]]
            item = {**item, "namespace": namespace, "name": name}
        output.append(item)
    return {**response, "output": output}


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else type(item).__name__


def _joined_call(item: Body) -> Body:
    if item.get("type") != "function_call" or not item.get("namespace"):
        return item
    joined = {key: value for key, value in item.items() if key != "namespace"}
    return {**joined, "name": f"{item['namespace']}{_JOINT}{item['name']}"}


def _warn_dropped(what: str, kinds: list[str]) -> None:
    if kinds:
        log.warning(
            "Left out of a streaming request: %s of type %s, which chat engines do not accept.",
            what,
            sorted(set(kinds)),
        )
