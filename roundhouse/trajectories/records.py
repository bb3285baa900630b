"""Rollouts and turns as Python objects: what the rollout engine makes and the Parquet writers take; and as a
person reads them (`as_markdown`).

    task ── group ── rollout ── turn (one model call)
                        └────── sequence (what is trained on; made by validation)

Invariant: a rollout that failed has no reward (`reward is None`), and a rollout that completed or was truncated has one.
Token IDs are what the engine returned, never re-tokenised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Outcome of a rollout. requested = completed + truncated + failed + masked + omitted, always."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ended by a limit of turns or tokens; it has a reward."""
    FAILED = "failed"
    """No reward exists; `failure_kind` and `failure_detail` say why."""
    MASKED = "masked"
    """Has a reward but must not be trained on (the environment or an agent said so, or validation refused it)."""
    OMITTED = "omitted"
    """Not trained on although nothing is wrong with it: its group was too small, or it was never started."""

    @property
    def rewarded(self) -> bool:
        return self is not Status.FAILED and self is not Status.OMITTED


class FailureKind(StrEnum):
    """Who is at fault, hence whether a retry can help (`roundhouse.errors`)."""

    INFRA = "infra"
    DATA = "data"


@dataclass(slots=True)
class Turn:
    """One model call."""

    turn: int
    """0, 1, … in order of the calls."""
    parent: int | None
    """Turn whose tokens this prompt continues; None begins a new root (the first turn, or a break)."""
    prompt_token_ids: list[int]
    """Only what the prompt adds to the parent's prompt and generation; the whole prompt at a root."""
    prompt_length: int
    """Length of the whole prompt as the engine saw it, in tokens."""
    prompt_digest: str
    """`digest_tokens` of the whole prompt as the engine saw it: the proof that the stored parts rebuild it."""
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    """Natural logarithms under the distribution sampled from (temperature applied), one a generated token."""
    policy_version: int
    """Version of the weights that answered; the oldest of them, where a refit came in between."""
    finish_reason: str
    """stop, tool_calls or length."""
    latency_seconds: float
    trained: bool = True
    """False: its tokens stay on record and in later prompts, and the loss skips them."""
    version_spans: list[dict[str, int]] | None = None
    """`[{"version": 3, "tokens": 17}, …]`: which version drew which of the generated tokens, in order; None: all are
    `policy_version`'s."""


@dataclass(slots=True)
class Rollout:
    """One attempt at a task, as the rollout engine leaves it."""

    group_id: str
    sample: int
    task: dict[str, Any]
    """The task row (NeMo Gym shape: `responses_create_params` and verifier fields)."""
    environment: str
    status: Status
    attempt: int = 1
    seed: int = 0
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as Responses items, input first, without token fields."""
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = ""
    """stop, length, max_turns, max_tokens, environment (a world's own limit), or empty when it failed."""
    failure_kind: FailureKind | None = None
    failure_code: str = ""
    """Short and stable. Of a failed rollout, the failure's type: engine_unreachable, engine_timeout, tool_timeout,
    environment_unavailable, verifier_failed, … Of a masked one, why, where the environment itself did not ask for it:
    token_capture_<reason> (its recorded calls cannot be joined in one way), malformed_token_fields (an import); else empty."""
    failure_detail: str = ""
    started_at: float = 0.0
    """Seconds since the epoch."""
    seconds: float = 0.0
    """Wall time of the last attempt."""
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.sample}"


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
