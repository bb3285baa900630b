"""The parser for the tool calls that a chat template writes, and the reader of harmony, GPT-OSS's form of replies.

Invariant: two parsers read alike for every engine, `hermes` and `openai` (harmony). The others are vLLM's, by its names.

    <|channel|>analysis<|message|>I add.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>
        ->  content <think>I add.</think>, call add({"a": 2})
    <|channel|>final<|message|>It is 5.<|return|>
        ->  content It is 5.
"""

from __future__ import annotations

import json
import re
from typing import Any

from roundhouse.generation.tool_calls import (
    THOUGHT_END,
    THOUGHT_START,
    TOOL_CALL_START,
    ToolCalls,
    ToolParser,
    bounded,
    parse_hermes,
    tool_call,
)

_SIGNS = (
    ("<|channel|>commentary", "openai"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>call:", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<function_calls>", "olmo3"),
    ("<atem:invoke", "muse_glimmer"),
    ("functools[", "phi4_mini_json"),
    ("<|start_of_role|>", "granite"),
    ("<|start_header_id|>", "llama3_json"),
)
"""A text of chat templates, and vLLM's parser for the calls that such a template writes. The first text counts."""


def parser_of_template(template: str) -> str:
    """Return the name of the tool-call parser for a chat template; hermes if its format is unknown."""
    name = next((name for sign, name in _SIGNS if sign in template), "hermes")
    if name == "deepseek_v31" and "```json" in template:
        return "deepseek_v3"
    return name


def parse_harmony(text: str, tools: list[dict[str, Any]]) -> tuple[str | None, ToolCalls]:
    """Read a reply in the harmony format: analysis becomes a thought, messages to functions become calls.

    A call with arguments that are not a JSON object is broken, as in the Hermes format.

    Returns:
        Thoughts and text without control tokens (None if empty), and the calls.
    """
    thoughts, texts, calls = [], [], []
    for part in text.split("<|start|>"):
        header, message, body = part.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body if message else header)[0]
        recipient = re.search(r"to=functions\.([\w.-]+)", header)
        if message and recipient is not None:
            calls.append(tool_call(recipient.group(1), body if _is_object(body) else TOOL_CALL_START + body))
        elif message and "<|channel|>analysis" in header:
            thoughts.append(f"{THOUGHT_START}{body}{THOUGHT_END}")
        else:
            texts.append(body)
    return "".join([*thoughts, *texts]) or None, bounded(calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


OWN_PARSERS: dict[str, ToolParser] = {"hermes": parse_hermes, "openai": parse_harmony}
"""Parsers that do not need vLLM."""
