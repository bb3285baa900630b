"""Recorded tokens put back into the history of an agent that does not echo them.

Invariant: tokens are put back only on an assistant message that ends, word for word, the conversation of a recorded call with
its reply, under the same tools and template arguments. The engine then continues exactly what it saw and drew, as it would for
an agent that echoes its items; wherever the agent edited its history (compaction, stripped reasoning), nothing is put back and
the prompt is a new root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import orjson

from roundhouse.compat.nemo_gym.model_server.requests import Body
from roundhouse.generation.protocol import TOKEN_FIELDS
from roundhouse.rollout.responses import Message

Recall = Callable[[bytes], dict[str, Any] | None]
"""Token fields of the call that ended in a conversation, by the conversation's digest."""


def with_recorded_tokens(chat: Body, recall: Recall) -> Body:
    """The chat body with token fields on the newest assistant message that `recall` knows; as it is where a message carries
    them already."""
    messages = chat["messages"]
    if any(message.get(TOKEN_FIELDS[0]) is not None for message in messages):
        return chat
    for place, digest in reversed(_digests(chat)):
        if (fields := recall(digest)) is not None:
            return {**chat, "messages": [*messages[:place], {**messages[place], **fields}, *messages[place + 1 :]]}
    return chat


def reply_digest(chat: Body, reply: Message) -> bytes:
    """Digest of a conversation that the reply ends."""
    return _digests({**chat, "messages": [*chat["messages"], {**reply, "role": "assistant"}]})[-1][1]


def _digests(chat: Body) -> list[tuple[int, bytes]]:
    """For each assistant message its place, and the digest of everything up to it."""
    metadata = chat.get("metadata") or {}
    begin = [chat.get("tools") or [], metadata.get("chat_template_kwargs")]
    running = hashlib.blake2b(orjson.dumps(begin), digest_size=16)
    digests = []
    for place, message in enumerate(chat["messages"]):
        running.update(orjson.dumps(_said(message)) + b"\n")
        if message["role"] == "assistant":
            digests.append((place, running.digest()))
    return digests


def _said(message: Message) -> list[Any]:
    """What a message says, the same in every dialect."""
    content = message.get("content") or ""
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        content = content[0].get("text")
    calls = [
        [call.get("id"), call["function"].get("name"), _canonical(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], content, message.get("tool_call_id"), calls]


def _canonical(arguments: Any) -> Any:
    """Arguments without their white space: Anthropic's dialect parses and writes them again."""
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, TypeError):
        return arguments
