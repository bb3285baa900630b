"""Convert a caller's request to an engine's request; pure functions.

Invariant: `sampling_overrides` take precedence, then the caller's fields, then the extra fields of the request's
metadata, then the configuration's. A request carries recorded tokens once, on the newest message that has them: they
include the tokens of all earlier turns, so the engine can continue the prompt exactly without the others.

Recorded tokens are restored in the history of an agent that does not echo them. Invariant: tokens are added only to an
assistant message that ends, word for word, the conversation of a recorded call with its reply, under the same tools and
template arguments. The engine then continues its recorded tokens exactly. If the agent edited its history (compaction,
stripped reasoning), nothing is added and the prompt is a new root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from roundhouse.generation.protocol import TOKEN_FIELDS, Body, invalid
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from roundhouse.rollout.responses import (
    CARRIED,
    VERSION_SPANS,
    Message,
    UnsupportedItem,
    chat_messages,
    chat_tools,
    split_thinking,
)

_SHARED_FIELDS = (
    "metadata",
    "model",
    "parallel_tool_calls",
    "service_tier",
    "store",
    "temperature",
    "tool_choice",
    "top_logprobs",
    "top_p",
    "user",
)
"""Parameters that both dialects have. What chat has not (text, include, truncation, …) is left out, as NeMo Gym does."""

_TOKENIZE_FIELDS = (
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "required_prefix_token_ids",
)


def chat_from_responses(body: Body) -> Body:
    """Return the chat-completion body of a checked Responses body.

    Raises:
        InvalidRequest: an item, a content part or a tool cannot be expressed in chat, or is malformed.
    """
    try:
        messages = chat_messages(body["input"], body.get("instructions"), developer_as_system=False)
        tools = chat_tools(body.get("tools") or ())
    except (UnsupportedItem, KeyError, TypeError, AttributeError) as error:
        text = str(error) if isinstance(error, UnsupportedItem) else f"malformed item: {error!r}"
        raise invalid(["input"], text) from error
    chat: Body = {"messages": messages}
    chat |= {key: body[key] for key in _SHARED_FIELDS if body.get(key) is not None}
    if (limit := body.get("max_output_tokens")) is not None:
        chat["max_tokens"] = limit
    if (effort := (body.get("reasoning") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if tools:
        chat["tools"] = tools
        choice = chat.get("tool_choice", "auto")
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            tool_choice = {"type": "function", "function": {"name": choice["name"]}}
        else:
            tool_choice = choice
        chat["tool_choice"] = tool_choice
    else:
        chat.pop("tool_choice", None)
        chat.pop("parallel_tool_calls", None)
    return chat


def engine_body(chat: Body, config: ModelServerConfig, *, tokens: bool) -> Body:
    """Return the engine's request.

    Args:
        chat: a chat-completion body; not changed.
        tokens: whether token IDs and log-probabilities are requested.

    Raises:
        InvalidRequest: the metadata is malformed, or several choices are requested.
    """
    metadata = chat.get("metadata") or {}
    messages = chat["messages"]
    newest = -1
    if tokens:
        newest = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get(TOKEN_FIELDS[0])), -1)
    cut = config.uses_reasoning_parser and not config.preserve_reasoning_in_assistant_content
    sent = []
    for place, message in enumerate(messages):
        role = message["role"]
        unasked = (VERSION_SPANS,) if place == newest else CARRIED
        if not message.keys().isdisjoint(unasked):
            message = {key: value for key, value in message.items() if key not in unasked}
        if role == "assistant" and cut and message.get("content"):
            message = _without_thinking(message, keep=config.uses_interleaved_reasoning)
        elif role == "developer" and config.replace_developer_role_with_system:
            message = {**message, "role": "system"}
        sent.append(message)
    body = {**chat, "model": config.model, "messages": sent}
    template = {**(config.chat_template_kwargs or {}), **_from_metadata(metadata, "chat_template_kwargs")}
    if template:
        body["chat_template_kwargs"] = template
    if tokens:
        # Zero, not null: vLLM gives no log-probability at all for null.
        body |= {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
        if config.request_prompt_and_generation_token_ids:
            body["return_token_ids"] = True
    if body.get("top_logprobs", 0) is None:
        del body["top_logprobs"]
    body = {**(config.extra_body or {}), **_from_metadata(metadata, "extra_body"), **body}
    _splice_audio(body, metadata)
    body |= config.sampling_overrides or {}
    if body.get("n") not in (None, 1):
        raise invalid(["n"], "one choice a call", body["n"])
    return body


def tokenize_body(body: Body) -> Body:
    """Return the part of an engine's body that determines its prompt."""
    return {key: body[key] for key in _TOKENIZE_FIELDS if key in body}


def ends_in_reasoning_only(body: Body) -> bool:
    """Return whether the last message is an assistant message without text and tool calls."""
    last = body["messages"][-1] if body["messages"] else {}
    return last.get("role") == "assistant" and not last.get("content") and not last.get("tool_calls")


def _from_metadata(metadata: Any, key: str) -> dict[str, Any]:
    """A JSON object that the metadata carries as a string."""
    try:
        value = orjson.loads(metadata.get(key) or "{}")
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise invalid(["metadata", key], f"not a JSON object in a string: {error}") from error
    if not isinstance(value, dict):
        raise invalid(["metadata", key], "not a JSON object in a string", value)
    return value


def _without_thinking(message: Message, *, keep: bool) -> Message:
    """Return the message without think blocks; the first one goes into separate fields if they are kept."""
    content = message["content"]
    thoughts: list[str] = []
    if isinstance(content, str):
        thoughts, content = split_thinking(content)
    else:
        parts = []
        for part in content:
            part_thoughts, text = split_thinking(part.get("text") or "")
            thoughts += part_thoughts
            parts.append({**part, "text": text} if part_thoughts else part)
        content = parts
    if not thoughts:
        return message
    # vLLM from 0.16 on reads `reasoning`, earlier ones and chat templates read `reasoning_content`.
    reasoning = {"reasoning_content": thoughts[0], "reasoning": thoughts[0]} if keep else {}
    return {**message, "content": content, **reasoning}


def _splice_audio(body: Body, metadata: Mapping[str, Any]) -> None:
    """Put the metadata's audio before the text of the newest user message: Responses items cannot hold it."""
    for key in ("audio_path", "audio_paths"):
        if metadata.get(key):
            raise invalid(
                ["metadata", key], "files of this machine are not read; send the audio in metadata.audio_data"
            )
    url = metadata.get("audio_data")
    if not url:
        return
    body["metadata"] = {key: value for key, value in metadata.items() if key != "audio_data"}
    if not body["metadata"]:
        del body["metadata"]
    audio = {"type": "audio_url", "audio_url": {"url": url}}
    messages = body["messages"]
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].get("role") == "user":
            content = messages[place].get("content") or []
            text = [{"type": "text", "text": content}] if isinstance(content, str) else content
            messages[place] = {**messages[place], "content": [audio, *text]}
            return
    messages.append({"role": "user", "content": [audio]})


Recall = Callable[[bytes], dict[str, Any] | None]
"""Token fields of the call that ended in a conversation, by the conversation's digest."""


def with_recorded_tokens(chat: Body, recall: Recall) -> Body:
    """Return the chat body with token fields on the newest assistant message that `recall` knows.

    If a message carries token fields already, the body is returned unchanged.
    """
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
        # A message's content, the same in every dialect
        content = message.get("content") or ""
        if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
            content = content[0].get("text")
        calls = [
            [call.get("id"), call["function"].get("name"), _canonical(call["function"].get("arguments"))]
            for call in message.get("tool_calls") or ()
        ]
        running.update(orjson.dumps([message["role"], content, message.get("tool_call_id"), calls]) + b"\n")
        if message["role"] == "assistant":
            digests.append((place, running.digest()))
    return digests


def _canonical(arguments: Any) -> Any:
    """Arguments without their white space: Anthropic's dialect parses and writes them again."""
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, TypeError):
        return arguments
