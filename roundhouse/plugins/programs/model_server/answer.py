"""Convert an engine's reply to an answer in any dialect; pure functions.

Invariant: the token IDs of an answer are the engine's, never invented: if two places of a reply have them, they are
equal, and a reply with only a part is refused. An answer without tokens has generated nothing (the prompt did not fit)
or was not asked for them.

Token IDs are taken from the first existing of these:
    1. the message: prompt_token_ids, generation_token_ids, generation_log_probs
    2. the reply's prompt_token_ids and the choice's token_ids, with the choice's log-probabilities
    3. the choice's log-probabilities, with tokens `token_id:<n>`; the prompt then comes from /tokenize

Also Anthropic's Messages dialect, to a Responses body and back. Invariant: a conversation has the same content in both:
system text, user and assistant texts, thinking, tool calls with their results, images. Unknown top-level fields are
ignored, because clients of this dialect send many; a block without a form in the other dialect is refused. This dialect
cannot hold token fields.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from roundhouse.generation.protocol import RESPONSES_FIELDS, TOKEN_FIELDS, BadReply, Body, invalid
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from roundhouse.rollout.responses import Message, assistant_items, response_object, usage_object, with_token_fields

_MARK = "token_id:"


@dataclass(slots=True)
class AnswerTokens:
    """Token IDs of one call."""

    prompt: list[int] | None
    """None if only /tokenize has it."""
    generation: list[int]
    log_probs: list[float]
    routed_experts: Any = None
    version_spans: list[dict[str, int]] | None = None
    """Policy versions of the tokens, if a refit came in between."""

    def fields(self) -> dict[str, Any]:
        """In the form of a message or an item."""
        tokens = dict(zip(TOKEN_FIELDS, (self.prompt, self.generation, self.log_probs), strict=True))
        more = {"routed_experts": self.routed_experts, "version_spans": self.version_spans}
        return tokens | {name: value for name, value in more.items() if value is not None}


@dataclass(slots=True)
class ModelAnswer:
    """One model call as all dialects need it."""

    message: Message
    """Role, content (think blocks inside) and tool calls; without token fields."""
    finish_reason: str
    model: str
    tokens: AnswerTokens | None = None
    logprobs: Any = None
    """The choice's, for a caller that asked for them and not for token IDs."""
    usage: dict[str, Any] | None = None
    policy_version: int | None = None
    created: float = field(default_factory=time.time)
    reply: Body = field(default_factory=dict)
    """Other top-level fields of the engine's reply."""


def empty_answer(model: str, finish_reason: str) -> ModelAnswer:
    """Stands for a call that no engine answered: the prompt does not fit (`length`) or is not asked (`content_filter`)."""
    return ModelAnswer({"role": "assistant", "content": None}, finish_reason, model)


def read_answer(reply: Any, config: ModelServerConfig, *, tokens: bool) -> ModelAnswer:
    """Convert the engine's chat completion to an answer.

    Raises:
        BadReply: it is not one, its token IDs are partial or contradictory, or it separates reasoning against the
            configuration.
    """
    try:
        choice = reply["choices"][0]
        reply_message = choice["message"]
        content = reply_message.get("content")
        reasoning = reply_message.get("reasoning_content") or reply_message.get("reasoning")
        if reasoning:
            if not config.uses_reasoning_parser:
                raise BadReply(
                    "The engine separates reasoning (it runs a reasoning parser), but uses_reasoning_parser is false. "
                    "Set it to true, or start the engine without the parser."
                )
            content = f"<think>{reasoning}</think>{content or ''}"
        message = {"role": "assistant", "content": content}
        if reply_message.get("tool_calls"):
            message["tool_calls"] = reply_message["tool_calls"]
        return ModelAnswer(
            message=message,
            finish_reason=choice.get("finish_reason") or "stop",
            model=reply.get("model") or config.model,
            tokens=_tokens(reply, choice, reply_message) if tokens else None,
            logprobs=None if tokens else choice.get("logprobs"),
            usage=reply.get("usage"),
            policy_version=reply.get("policy_version"),
            created=reply.get("created") or time.time(),
            reply={
                key: reply[key] for key in ("id", "system_fingerprint", "service_tier") if reply.get(key) is not None
            },
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadReply(f"The engine's reply is not a chat completion: {error!r}") from error


def _tokens(reply: Body, choice: Body, message: Message) -> AnswerTokens:
    in_message = _message_tokens(message, reply.get("version_spans"))
    prompt, generation = reply.get("prompt_token_ids"), choice.get("token_ids")
    beside: tuple[Any, Any] | None = None if prompt is None and generation is None else (prompt, generation)
    if beside is not None and not (isinstance(prompt, list) and isinstance(generation, list)):
        raise BadReply("The reply has only one of prompt_token_ids and choices[0].token_ids.")
    drawn = _log_prob_tokens(choice)
    if in_message is None and drawn is None:
        raise BadReply(
            "The engine returned no token IDs: its message lacks "
            f"{', '.join(TOKEN_FIELDS)}, and its log-probabilities do not read {_MARK}<n>."
        )
    if beside is not None:
        _must_agree(in_message.prompt if in_message else beside[0], beside[0], "prompt")
        _must_agree(in_message.generation if in_message else beside[1], beside[1], "generation")
    if in_message is not None:
        if drawn is not None:
            _must_agree(in_message.generation, drawn[0], "generation")
        return in_message
    assert drawn is not None
    if beside is not None:
        _must_agree(beside[1], drawn[0], "generation")
    more = message.get("routed_experts"), reply.get("version_spans")
    return AnswerTokens(beside[0] if beside else None, *drawn, *more)


def _message_tokens(message: Message, spans: list[dict[str, int]] | None) -> AnswerTokens | None:
    lists = [message.get(name) for name in TOKEN_FIELDS]
    if all(value is None for value in lists):
        return None
    if not all(isinstance(value, list) for value in lists):
        raise BadReply(f"The reply's message has only some of {', '.join(TOKEN_FIELDS)}.")
    prompt, generation, log_probs = lists
    if len(generation or ()) != len(log_probs or ()):
        raise BadReply(
            f"The reply's message has {len(generation or ())} generated tokens and {len(log_probs or ())} log-probabilities."
        )
    return AnswerTokens(prompt, generation or [], log_probs or [], message.get("routed_experts"), spans)


def _log_prob_tokens(choice: Body) -> tuple[list[int], list[float]] | None:
    entries = (choice.get("logprobs") or {}).get("content")
    if not isinstance(entries, list):
        return None
    tokens, log_probs = [], []
    for entry in entries:
        token = entry["token"]
        if not token.startswith(_MARK) or not token[len(_MARK) :].isdigit():
            return None
        tokens.append(int(token[len(_MARK) :]))
        log_probs.append(float(entry["logprob"]))
    return tokens, log_probs


def _must_agree(one: Any, other: Any, what: str) -> None:
    if one != other:
        raise BadReply(f"The reply has two different {what}s in tokens; it is unknown which one was sampled.")


# -- dialects -------------------------------------------------------------------------------------------------------


def as_response(answer: ModelAnswer, asked: Body, config: ModelServerConfig) -> Body:
    """The Responses object; its token fields are on the last item of the output."""
    output = assistant_items(answer.message, f"msg_{uuid.uuid4().hex}", reasoning=config.uses_reasoning_parser)
    if answer.tokens is not None and config.return_token_id_information:
        output = with_token_fields(output, answer.tokens.fields())
    params: Body = dict.fromkeys(_ECHOED)
    params |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    params |= {key: asked[key] for key in _ECHOED if key in asked}
    usage = None
    if reported := answer.usage:
        usage = usage_object(
            reported.get("prompt_tokens") or 0,
            reported.get("completion_tokens") or 0,
            total_tokens=reported.get("total_tokens"),
            cached_tokens=(reported.get("prompt_tokens_details") or {}).get("cached_tokens"),
            reasoning_tokens=(reported.get("completion_tokens_details") or {}).get("reasoning_tokens"),
        )
    return {
        **response_object(
            f"resp_{uuid.uuid4().hex}",
            output,
            model=config.model,
            created_at=float(answer.created),
            finish_reason=answer.finish_reason,
            params=params,
        ),
        "usage": usage,
    }


_ECHOED = tuple(key for key in RESPONSES_FIELDS if key not in ("input", "include", "store", "stream"))


def as_chat_completion(answer: ModelAnswer, config: ModelServerConfig) -> Body:
    """The chat completion; its token fields are in the message."""
    message = answer.message
    if answer.tokens is not None and config.return_token_id_information:
        message = {**message, **answer.tokens.fields()}
    completion = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(answer.created),
        "model": answer.model,
        "choices": [
            {"index": 0, "finish_reason": answer.finish_reason, "message": message, "logprobs": answer.logprobs}
        ],
        "usage": answer.usage,
        **answer.reply,
    }
    if answer.policy_version is not None:
        completion["policy_version"] = answer.policy_version
    return completion


_STOP_REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def responses_body(body: Any) -> Body:
    """Return the equivalent Responses body.

    Raises:
        InvalidRequest: a part of it cannot be expressed there.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise invalid(["messages"], "a list of messages is required")
    try:
        request: Body = {"input": [item for message in body["messages"] for item in _items(message)]}
        system = body.get("system")
        if system and not isinstance(system, str):
            system = "\n".join(block["text"] for block in system if block.get("type") == "text" and block.get("text"))
        names = {"model": "model", "max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}
        request |= {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
        if system:
            request["instructions"] = system
        if body.get("tools"):
            request["tools"] = [
                {
                    "type": "function",
                    "name": tool["name"],
                    "description": tool.get("description"),
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                    "strict": False,
                }
                for tool in body["tools"]
            ]
        if (choice := body.get("tool_choice")) is not None:
            kind = choice.get("type")
            if kind == "tool":
                request["tool_choice"] = {"type": "function", "name": choice["name"]}
            elif kind in _TOOL_CHOICES:
                request["tool_choice"] = _TOOL_CHOICES[kind]
            else:
                raise invalid(["tool_choice"], f"type {kind!r} is not one of {sorted(_TOOL_CHOICES)} and tool", choice)
    except (KeyError, TypeError, AttributeError) as error:
        raise invalid(["messages"], f"malformed: {error!r}") from error
    return request


def _items(message: Body) -> list[Body]:
    """One message as items: adjacent texts and images are one message item, each other block is one."""
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
            if block["type"] == "text":
                part = {"type": "input_text", "text": block["text"]}
            else:
                source = block["source"]
                if source.get("type") == "url":
                    part = {"type": "input_image", "image_url": source["url"], "detail": "auto"}
                elif source.get("type") != "base64":
                    raise invalid(
                        ["messages"], f"an image's source has type {source.get('type')!r}, not base64 or url", block
                    )
                else:
                    url = f"data:{source['media_type']};base64,{source['data']}"
                    part = {"type": "input_image", "image_url": url, "detail": "auto"}
            parts.append(part)
        elif block.get("type") == "redacted_thinking":
            continue  # it holds nothing that could be shown
        else:
            flush()
            items.append(_item(block))
    flush()
    return items


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
        content = block.get("content") or ""
        if isinstance(content, str):
            text = content
        else:
            if any(part.get("type") != "text" for part in content):
                raise invalid(["messages"], "a tool_result holds something else than text", block)
            text = "\n".join(part["text"] for part in content)
        return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": text}
    raise invalid(["messages"], f"a content block of type {kind!r} cannot be shown to the policy", block)


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
        # The arguments as the object that this dialect wants; anything else is put under `invalid_arguments`, for the
        # agent's tool to refuse in its own words
        arguments = item["arguments"]
        try:
            value = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            value = None
        return [
            {
                "type": "tool_use",
                "id": item["call_id"],
                "name": item["name"],
                "input": (value if isinstance(value, dict) else {"invalid_arguments": arguments}),
            }
        ]
    return [{"type": "text", "text": part["text"]} for part in item["content"]]
