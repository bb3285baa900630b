"""A rollout row in the form that NeMo RL trains on: alternating what was read and what was generated, as tokens. Pure.

Invariant: the messages' tokens joined are the last prompt and its generation; a prompt that does not begin with all tokens so
far is refused, since its log-probabilities would be those of another history.

    prompt [1 2] generated [3] · prompt [1 2 3 4] generated [5]
        ->  user [1 2], assistant [3], user [4], assistant [5]
"""

from __future__ import annotations

from typing import Any

from roundhouse.compat.nemo_gym.exchange.json_lines import Row
from roundhouse.compat.nemo_gym.exchange.outgoing import Item, carries_tokens
from roundhouse.errors import DataError

_CALL_TAGS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
_THINK_TAGS = ("<think>", "</think>")


def message_log(row: Row) -> list[dict[str, Any]]:
    """The messages of a rollout: role, `token_ids` and, of the assistant's, `generation_logprobs` and two flags.

    `is_invalid_tool_call`: the text holds a tag of a tool call. `has_malformed_thinking`: it holds one of thinking, or a
    reasoning item holds one more than once.

    Raises:
        DataError: no item has tokens, or a prompt does not continue the tokens before it.
    """
    messages: list[dict[str, Any]] = []
    seen: list[int] = []
    for place, item in enumerate(row["response"]["output"]):
        if not carries_tokens(item):
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        if prompt[: len(seen)] != seen:
            raise DataError(f"Output item {place}: its prompt does not begin with the {len(seen)} tokens before it.")
        messages.append({"role": "user", "content": "", "token_ids": prompt[len(seen) :]})
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "token_ids": generated,
                "generation_logprobs": item["generation_log_probs"],
                "is_invalid_tool_call": _has(_text(item), _CALL_TAGS, 1),
                "has_malformed_thinking": _has(_text(item), _THINK_TAGS, 1) or _has(_thoughts(item), _THINK_TAGS, 2),
            }
        )
        seen = prompt + generated
    if not messages:
        raise DataError("No item of the rollout's output has generated tokens: there is nothing to train on.")
    return messages


def _has(text: str, tags: tuple[str, ...], times: int) -> bool:
    return any(text.count(tag) >= times for tag in tags)


def _text(item: Item) -> str:
    content = item.get("content") if item.get("type", "message") == "message" else None
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())


def _thoughts(item: Item) -> str:
    return (
        "".join(part.get("text") or "" for part in item.get("summary") or ()) if item.get("type") == "reasoning" else ""
    )
