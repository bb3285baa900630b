"""A rollout as a person reads it."""

from __future__ import annotations

from typing import Any

from roundhouse.trajectories.records import Rollout


def as_markdown(rollout: Rollout) -> str:
    """The conversation with its outcome, as Markdown."""
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    lines = [f"### {rollout.rollout_id}: {rollout.status.value}, reward {reward}"]
    if rollout.failure_code:
        lines.append(f"_{rollout.failure_code}: {rollout.failure_detail}_")
    lines += [f"- {line}" for line in conversation_lines(rollout.items)]
    return "\n".join(lines)


def conversation_lines(items: list[dict[str, Any]]) -> list[str]:
    """One line an item: `user: …`, `call: calc({…})`, `tool: …`, `assistant: …`."""
    lines = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            lines.append(f"**call** `{item['name']}({item['arguments']})`")
        elif kind == "function_call_output":
            lines.append(f"**tool** `{item['output']}`")
        else:
            lines.append(f"**{item.get('role', kind)}** {item_text(item)}")
    return lines


def item_text(item: dict[str, Any]) -> str:
    """The text of a message or of reasoning."""
    content = item.get("content") or item.get("summary") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
