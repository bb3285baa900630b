"""Which items of a rollout belong to which model call; pure functions.

Invariant: a call's token fields stand on the last item of its output and cover all of it. Items carry no call number, so the
calls are told apart by what an engine's reply looks like (reasoning, then text, then tool calls) and by what stands between
two replies (a tool's output, a user's message). Where that does not give as many replies as there were calls, the calls that
are left over have no item.

    message · function_call · function_call_output · message,  2 calls  ->  items 1 and 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundhouse.generation.protocol import TOKEN_FIELDS

Item = dict[str, Any]

_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}


def input_items(task: dict[str, Any]) -> list[Item]:
    """The conversation that a task row begins with, as items; empty if it has none."""
    params = task.get("responses_create_params")
    given = params.get("input") if isinstance(params, dict) else None
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list) and all(isinstance(item, dict) for item in given):
        return [{"type": "message", **item} for item in given]
    return []


def last_items(output: Sequence[Item], calls: int) -> list[int | None]:
    """For each model call, the place in `output` of its last item; None for a call without one."""
    for replies in (_ends(output, within=True), _ends(output, within=False)):
        if len(replies) == calls:
            return list(replies)
    ends = _ends(output, within=True)[:calls]
    return [*ends, *[None] * (calls - len(ends))]


def carries_tokens(item: Item) -> bool:
    """Whether all three token fields are there and can be those of a call."""
    prompt, generated, log_probs = (item.get(name) for name in TOKEN_FIELDS)
    return isinstance(prompt, list) and isinstance(generated, list) and isinstance(log_probs, list) and bool(generated)


def _ends(output: Sequence[Item], *, within: bool) -> list[int]:
    """Places at which a reply ends: before an item of another origin and, `within` a run, where a new reply begins."""
    ends: list[int] = []
    before: int | None = None
    for place, item in enumerate(output):
        rank = _rank(item)
        if before is not None and (rank is None or (within and rank <= before and rank < _ORDER["function_call"])):
            ends.append(place - 1)
        before = rank
    return [*ends, len(output) - 1] if before is not None else ends


def _rank(item: Item) -> int | None:
    """The item's place in a reply; None for what the policy did not say."""
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") != "assistant":
        return None
    return _ORDER.get(kind)
