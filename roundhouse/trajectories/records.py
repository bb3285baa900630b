"""Rollouts and turns as Python objects: what the rollout engine makes, validation judges and the Parquet writers take.

    task ── group ── rollout ── turn (one model call)
                        └────── sequence (what is trained on; made by validation)

Invariant: a rollout that failed has no reward (`reward is None`), and a rollout that completed or was truncated has one. Token
IDs are what the engine returned, never re-tokenised.

Spread of a group's rewards, without which it is not trained on, belongs to a whole group and never to one of its rollouts:
measured over the others of a rollout, the single right answer among wrong ones would have none, and would be the one to be
filtered out.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
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


class CallStage(StrEnum):
    """What one model call passes through, in order."""

    REQUEST = "LF1 Request"
    """The JSON that is sent: messages or Responses items."""
    INPUT_PROMPT = "LF2 Input Prompt"
    """The text that the chat template makes of it."""
    PROMPT_TOKEN_IDS = "LF3 Prompt Token IDs"
    """That text in tokens."""
    GENERATION_TOKEN_IDS = "LF4 Generation Token IDs"
    """What the model draws."""
    GENERATION = "LF5 Generation"
    """Those tokens as text."""
    RESPONSE = "LF6 Response"
    """That text, parsed into content and tool calls."""


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
    """Natural logarithms under the distribution sampled from (temperature applied), one a generated token; none where the
    tokens were written, not sampled."""
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
    reward: float | None = None
    """What the environment gave for this turn, a part of the rollout's reward; None: it said nothing yet of the turns since the
    last one with a reward. What is left of the rollout's reward belongs to its last turns."""


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
    branched_from: str | None = None
    """Id of the rollout whose turns it begins with; these are not trained on. None: it begins with its task."""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.sample}"

    @property
    def generated_tokens(self) -> int:
        """Over all its turns; of a branch, over those that were made for it."""
        own = [turn for turn in self.turns if turn.trained] if self.branched_from is not None else self.turns
        return sum(len(turn.generation_token_ids) for turn in own)


@dataclass(eq=False)
class Refusal(Exception):
    """Why a rollout was kept from training."""

    reason: str
    evidence: str
    turn: int | None = None
    outcome: Status = Status.MASKED


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


def digest_tokens(token_ids: Sequence[int]) -> str:
    """First 16 hex digits of SHA-256 over the IDs as little-endian int32."""
    data = array("i", token_ids)
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


class GrowingDigest:
    """`digest_tokens` of a sequence that only grows, at the cost of what is new."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def extend(self, token_ids: Sequence[int]) -> str:
        """Append; the digest of everything so far.

        Raises:
            TypeError, OverflowError: they are no token IDs.
        """
        self._hash.update(array("i", token_ids).tobytes())
        return self._hash.hexdigest()[:16]


SEEDS = 2**31
"""How many seeds there are; servers take no larger ones."""


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from named parts, e.g. (run seed, iteration, group, sample, turn).

    The same parts give the same seed on every machine; different parts give unrelated ones.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % SEEDS


SPREAD_TOLERANCE = 1e-9
"""Rewards of a group that differ by less (relative to the largest, at least 1) count as equal: it is rounding."""


def groups_with_spread(rollouts: Iterable[Rollout]) -> list[str]:
    """Group ids in order of first appearance; failed and masked rollouts do not count."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        own = rewards.setdefault(rollout.group_id, [])
        if rollout.status in (Status.COMPLETED, Status.TRUNCATED) and rollout.reward is not None:
            own.append(rollout.reward)
    return [group for group, values in rewards.items() if values and has_spread(values)]


def has_spread(rewards: list[float]) -> bool:
    """Whether the rewards (at least one) are not all equal."""
    highest, lowest = max(rewards), min(rewards)
    return highest - lowest > SPREAD_TOLERANCE * max(1.0, abs(highest), abs(lowest))


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """Probability that at least one of k rollouts passes, from `passed` of `rollouts`: 1 − C(n − c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1).
    """
    if not 1 <= k <= rollouts:
        raise ValueError(f"pass@{k} of {rollouts} rollouts: k must be between 1 and their number")
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)
