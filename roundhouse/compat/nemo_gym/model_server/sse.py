"""Whole answers replayed as server-sent events, in the order and shape in which each dialect's clients read them.

Invariant: the events of a stream add up to the answer that the same request gets without `stream`. Nothing is streamed while
the engine works: the answer is computed first, so retries and errors are the same with and without a stream.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import orjson

Event = dict[str, Any]


def responses_events(response: Event) -> bytes:
    """`response.created`, for each item added · text · done, then `response.completed` (also of an incomplete response,
    which its status tells)."""
    return _numbered(_responses(response))


def _responses(response: Event) -> Iterator[Event]:
    yield {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
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
        yield {"type": "response.output_item.added", "output_index": index, "item": shell}
        if item["type"] == "message":
            for part, content in enumerate(item["content"]):
                yield {
                    "type": "response.output_text.delta",
                    **place,
                    "content_index": part,
                    "delta": content["text"],
                }
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": response}


def responses_failure(text: str, code: str = "server_error") -> bytes:
    """A stream whose end says that there is no answer: `response.failed`."""
    response: Event = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "status": "failed",
        "output": [],
        "error": {"code": code, "message": text},
    }
    created = {**response, "status": "in_progress", "error": None}
    return _numbered(
        iter([{"type": "response.created", "response": created}, {"type": "response.failed", "response": response}])
    )


def chat_chunks(completion: Event, *, include_usage: bool) -> bytes:
    """Chunks of role, content and tool calls, the finish reason, on wish the usage, then `[DONE]`. No token IDs."""
    shared = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        {**shared, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": finish}]}
        for choice in completion["choices"]
        for delta, finish in _chat_deltas(choice)
    ]
    if include_usage and completion.get("usage") is not None:
        chunks.append({**shared, "choices": [], "usage": completion["usage"]})
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def _chat_deltas(choice: Event) -> Iterator[tuple[Event, str | None]]:
    message = choice["message"]
    yield {"role": "assistant"}, None
    if message.get("content"):
        yield {"content": message["content"]}, None
    if message.get("tool_calls"):
        yield {"tool_calls": [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]}, None
    yield {}, choice["finish_reason"]


def messages_events(message: Event) -> bytes:
    """Anthropic's events: `message_start`, for each block start · delta · stop, `message_delta`, `message_stop`."""
    return b"".join(map(_named, _messages(message)))


def _messages(message: Event) -> Iterator[Event]:
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        shell, delta = _block(block)
        yield {"type": "content_block_start", "index": index, "content_block": shell}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": message["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def _block(block: Event) -> tuple[Event, Event]:
    """A content block as it begins, and all of it as one delta."""
    kind = block["type"]
    if kind == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
        return {**block, "input": {}}, delta
    # A thinking block's text is under "thinking", a text block's under "text".
    return {"type": kind, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _numbered(events: Iterator[Event]) -> bytes:
    return b"".join(_named({**event, "sequence_number": number}) for number, event in enumerate(events))


def _named(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
