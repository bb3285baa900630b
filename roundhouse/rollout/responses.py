"""Conversion between Responses items (environments, files) and chat messages (engines); pure functions.

Invariant: folding the items of an assistant turn returns the original message: text, tool calls and, if present, the
three token fields. The last item of a model call carries its token fields. Images and videos pass through in chat form;
the engine decides if it supports them.

    {"role": "assistant", "content": "<think>hm</think>ok", "tool_calls": [c]}
        ⇄  reasoning(hm) · message(ok) · function_call(c) + token fields
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roundhouse.errors import DataError
from roundhouse.generation.protocol import TOKEN_FIELDS

Item = dict[str, Any]
Message = dict[str, Any]

_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_TEXT_PARTS = ("input_text", "output_text", "text")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


VERSION_SPANS = "version_spans"
CARRIED = (*TOKEN_FIELDS, "routed_experts", VERSION_SPANS)
"""Fields of a model call that travel with its message: token IDs, log-probabilities, routed experts (some engines), and
the versions that sampled the tokens if a refit happened in between."""


class UnsupportedItem(DataError):
    """A Responses item, content part or tool without a chat completion form."""


# -- Responses to chat ----------------------------------------------------------------------------------------------


def chat_messages(
    items: str | Sequence[Item], instructions: str | None = None, *, developer_as_system: bool = True
) -> list[Message]:
    """The conversation as chat messages.

    `instructions` stand first, joined with all leading system messages by blank lines. Chat templates of open models know
    no developer role, hence `developer_as_system`.

    Raises:
        UnsupportedItem: an item or a content part has a type that chat messages do not know.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[Message] = []
    turn = _AssistantTurn()
    for item in items:
        if turn.takes(item):
            continue
        messages += turn.messages()
        turn = _AssistantTurn()
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "function_call_output":
            plain = {"role": "tool", "tool_call_id": item["call_id"], "content": _text_parts(item.get("output"))}
        elif kind == "message" and role == "tool":
            plain = {
                "role": "tool",
                "tool_call_id": item["tool_call_id"],
                "content": _text_parts(item.get("content")),
            }
        elif kind == "message" and role in ("user", "system", "developer"):
            chat_role = "system" if role == "developer" and developer_as_system else role
            plain = {"role": chat_role, "content": _chat_content(item.get("content"))}
        else:
            raise UnsupportedItem(
                f"An input item has type {kind!r} and role {role!r}; an engine can be shown messages, reasoning, "
                "function_call and function_call_output items. Remove it from responses_create_params.input."
            )
        messages.append(plain)
    messages += turn.messages()
    return _with_instructions(messages, instructions) if instructions else messages


def chat_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Responses function tools in chat shape; `strict` is dropped, engines do not enforce it.

    Raises:
        UnsupportedItem: a tool is not a function (a hosted tool, such as web_search).
    """
    return [_chat_tool(tool) for tool in tools]


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function" or not isinstance(tool.get("name"), str):
        raise UnsupportedItem(f"A tool has type {tool.get('type')!r}; only function tools with a name can be offered.")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def tool_message(call_id: str, text: str) -> Message:
    """A tool's output as a chat message."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


class _AssistantTurn:
    """Consecutive assistant items on their way to one chat message."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._tokens: dict[str, Any] = {}
        self._open = False

    def takes(self, item: Item) -> bool:
        """Fold the item in, if it belongs to an assistant turn."""
        kind = item.get("type", "message")
        if kind == "reasoning":
            self._text += [f"<think>{part['text']}</think>" for part in item.get("summary", [])]
        elif kind == "function_call":
            self._calls.append(
                {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                }
            )
        elif kind == "message" and item.get("role") == "assistant":
            self._text.append(_text_of(item.get("content")))
            self._calls += item.get("tool_calls") or []
        else:
            return False
        if item.get(TOKEN_FIELDS[0]) is not None:
            self._tokens = {name: item[name] for name in CARRIED if item.get(name) is not None}
        self._open = True
        return True

    def messages(self) -> list[Message]:
        """The folded message; none if nothing was folded in."""
        if not self._open:
            return []
        message: Message = {"role": "assistant", "content": "".join(self._text) or None}
        if self._calls:
            message["tool_calls"] = self._calls
        return [message | self._tokens]


def _chat_content(content: Any) -> Any:
    """Return text unchanged and a list of parts in chat form, as text if it is a single text."""
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) == 1 and content[0].get("type") in _TEXT_PARTS:
        return content[0]["text"]
    return [_chat_part(part) for part in content]


def _text_parts(content: Any) -> Any:
    """Convert tool outputs as `_chat_content` does; chat allows only text for them."""
    if not isinstance(content, str):
        for part in content or ():
            if part.get("type") not in _TEXT_PARTS:
                raise UnsupportedItem(
                    f"A tool output holds a part of type {part.get('type')!r}; only text can be shown."
                )
    return _chat_content(content)


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": part["text"]}
    if kind == "input_image" and (url := _url(part.get("image_url"))):
        return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail") or "auto"}}
    if kind == "input_video" and (url := _url(part.get("video_url") or part.get("video"))):
        return {"type": "video_url", "video_url": {"url": url}}
    raise UnsupportedItem(
        f"A content part has type {kind!r}{'' if kind is None else ' or lacks its URL'}; supported: text parts, input_image "
        "with image_url, input_video with video_url."
    )


def _url(value: Any) -> Any:
    return value.get("url") if isinstance(value, dict) else value


def _text_of(content: Any) -> str:
    """Return the text of text-only content."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") == "refusal":
            parts.append(part["refusal"])
        elif part.get("type") in _TEXT_PARTS:
            parts.append(part["text"])
        else:
            raise UnsupportedItem(f"A content part has type {part.get('type')!r}; only text parts can be shown here.")
    return "".join(parts)


def _with_instructions(messages: list[Message], instructions: str) -> list[Message]:
    leading = 0
    while leading < len(messages) and messages[leading]["role"] in ("system", "developer"):
        leading += 1
    text = "\n\n".join([instructions, *(_text_of(message["content"]) for message in messages[:leading])])
    return [{"role": "system", "content": text}, *messages[leading:]]


# -- chat to Responses ----------------------------------------------------------------------------------------------


def items_from_chat(messages: Iterable[Message], id_prefix: str = "msg") -> list[Item]:
    """A whole chat conversation as Responses items; token fields of assistant messages go to their turn's last item."""
    items: list[Item] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            carried = {name: message[name] for name in CARRIED if name in message}
            items += with_token_fields(assistant_items(message, f"{id_prefix}_{index}"), carried)
        elif message["role"] == "tool":
            items.append(function_call_output(message["tool_call_id"], _text_of(message["content"])))
        else:
            content = message["content"]
            images = isinstance(content, list) and any(part.get("type") == "image_url" for part in content)
            shown = item_content(content) if images else _text_of(content)
            items.append({"type": "message", "role": message["role"], "content": shown})
    return items


def item_content(content: Any) -> Any:
    """Return the content of a chat message as that of an item."""
    if not isinstance(content, list):
        return content
    return [
        {
            "type": "input_image",
            "image_url": part["image_url"]["url"],
            "detail": part["image_url"].get("detail") or "auto",
        }
        if part.get("type") == "image_url"
        else part
        for part in content
    ]


def split_thinking(text: str) -> tuple[list[str], str]:
    """The think blocks of a text, and the text without them. A block that never closes stays in the text."""
    # Up to the last end, every beginning has one. After it, the pattern would look for one to the end of the text from each
    # beginning: half a minute for a policy that repeats <think>.
    closed, end, rest = text.rpartition("</think>")
    return _THINKING.findall(closed + end), _THINKING.sub("", closed + end) + rest


def assistant_items(message: Message, item_id: str, *, reasoning: bool = True) -> list[Item]:
    """One reply of a policy as items: all think blocks as one reasoning item, the text if there is any (or nothing else
    is), a function_call for each tool call. `item_id` begins the ids of the items that the policy does not name itself.

    Args:
        reasoning: False leaves think blocks in the text.
    """
    text = _text_of(message.get("content"))
    calls = message.get("tool_calls") or []
    items: list[Item] = []
    thoughts, text = split_thinking(text) if reasoning else ([], text)
    if thoughts:
        summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
        items.append({"type": "reasoning", "id": f"rs_{item_id.removeprefix('msg_')}", "summary": summary})
    if text or not (items or calls):
        part = {"type": "output_text", "text": text, "annotations": []}
        items.append({"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": [part]})
    for call in calls:
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": call["id"],
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    return items


def with_token_fields(items: list[Item], fields: Mapping[str, Any]) -> list[Item]:
    """The items of one model call, its token fields on the last."""
    return [*items[:-1], {**items[-1], **fields}] if fields else items


def item_problem(item: Any) -> str:
    """Return the reason why an item of a foreign conversation cannot be recorded; empty if it can.

    Items of a type that Responses does not name pass: they are kept as they are.
    """
    if not isinstance(item, dict):
        return "it is not an object"
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        return f"its type is {kind!r}, not a text"
    texts = _ITEM_TEXTS.get(kind, ())
    if wrong := [name for name in texts if not isinstance(item.get(name), str)]:
        return f"a {kind} has a text as {wrong[0]}"
    for name in ("content", "summary", "output"):
        value = item.get(name)
        if not isinstance(value, str | list | None):
            return f"{name} is neither text nor a list of parts"
        parts = value if isinstance(value, list) else []
        if not all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts):
            return f"a part of {name} is not an object, or its text is not a text"
    return ""


_ITEM_TEXTS = {"message": ("role",), "function_call": ("name", "arguments"), "function_call_output": ("call_id",)}


def function_call_output(call_id: str, text: str) -> Item:
    """A tool's output as an item."""
    return {"type": "function_call_output", "call_id": call_id, "output": text, "id": None, "status": None}


# -- the Responses object -------------------------------------------------------------------------------------------


def response_object(
    response_id: str,
    output: list[Item],
    *,
    model: str,
    created_at: float,
    finish_reason: str = "stop",
    input_tokens: int = 0,
    output_tokens: int = 0,
    params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A Responses object. `finish_reason` is that of the last model call; length and content_filter make it incomplete.

    Args:
        params: the request's parameters, echoed; without its input.
    """
    reason = _INCOMPLETE.get(finish_reason)
    echoed = {key: value for key, value in (params or {}).items() if key != "input"}
    return {
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **echoed,
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "error": None,
        "output": output,
        "usage": usage_object(input_tokens, output_tokens, cached_tokens=0, reasoning_tokens=0),
    }


_UNSET_PARAMS: dict[str, Any] = {
    **dict.fromkeys(
        [
            "background",
            "include",
            "instructions",
            "max_output_tokens",
            "max_tool_calls",
            "metadata",
            "model",
            "previous_response_id",
            "prompt",
            "reasoning",
            "service_tier",
            "store",
            "stream",
            "temperature",
            "text",
            "top_logprobs",
            "top_p",
            "truncation",
            "user",
        ]
    ),
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
_UNSET_RESPONSE: dict[str, Any] = dict.fromkeys(
    [
        "background",
        "conversation",
        "error",
        "incomplete_details",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "temperature",
        "text",
        "top_logprobs",
        "top_p",
        "truncation",
        "usage",
        "user",
    ]
)
_UNSET_ITEM: dict[str, dict[str, Any]] = {
    "function_call": {"id": None, "status": None},
    "function_call_output": {"id": None, "status": None},
    "reasoning": {"encrypted_content": None, "content": None},
}


def whole_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """`responses_create_params` with all fields that NeMo Gym's rows have: unset ones are null, or OpenAI's default."""
    return {**_UNSET_PARAMS, **params}


def whole_response(response: Mapping[str, Any], *, items: bool = True) -> dict[str, Any]:
    """The same of a Responses object and, with `items`, of those in its output."""
    output = [_whole_item(item) for item in response["output"]] if items else response["output"]
    return {**_UNSET_RESPONSE, **response, "output": output}


def _whole_item(item: Item) -> Item:
    whole = {**_UNSET_ITEM.get(item.get("type", ""), {}), **item}
    if item.get("role") == "assistant" and isinstance(item.get("content"), list):
        whole["content"] = [
            {"logprobs": None, **part} if part.get("type") == "output_text" else part for part in item["content"]
        ]
    if "generation_token_ids" in item:
        whole.setdefault("routed_experts", None)
    return whole


def usage_object(
    input_tokens: int,
    output_tokens: int,
    *,
    total_tokens: int | None = None,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Return token counts in the form of Responses objects; null for counts that the engine does not report."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": input_tokens + output_tokens if total_tokens is None else total_tokens,
    }
