"""Turns of a rollout in the order of its model calls, each holding only the tokens that its prompt adds.

Invariant: where a prompt begins with everything before it, the turn continues the one before and stores the rest; where it does
not, the turn is a new root and stores its whole prompt. Whether a break is allowed is judged later, by validation.

    call 0: prompt p0, generates g0        turn(parent=None, new=p0)
    call 1: prompt p0+g0+t, generates g1   turn(parent=0, new=t)
    call 2: prompt q (history re-rendered) turn(parent=None, new=q)
"""

from __future__ import annotations

from roundhouse.trajectories.records import Turn
from roundhouse.trajectories.tokens import GrowingDigest


class TurnChain:
    """Grows by one turn a call."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.tokens: list[int] = []
        """Prompt and generation of the newest call."""
        self._digest = GrowingDigest()
        """Of `tokens`."""

    def add(
        self,
        prompt: list[int],
        generated: list[int],
        log_probs: list[float],
        *,
        policy_version: int,
        finish_reason: str,
        latency_seconds: float = 0.0,
        version_spans: list[dict[str, int]] | None = None,
    ) -> Turn:
        """Record a call.

        Raises:
            TypeError, OverflowError: prompt or generation hold something else than token IDs.
        """
        known = len(self.tokens)
        continues = bool(self.turns) and prompt[:known] == self.tokens
        added = prompt[known:] if continues else prompt
        digest = self._digest if continues else GrowingDigest()
        turn = Turn(
            turn=len(self.turns),
            parent=len(self.turns) - 1 if continues else None,
            prompt_token_ids=added,
            prompt_length=len(prompt),
            prompt_digest=digest.extend(added),
            generation_token_ids=generated,
            generation_log_probs=log_probs,
            policy_version=policy_version,
            finish_reason=finish_reason,
            latency_seconds=latency_seconds,
            version_spans=version_spans,
        )
        digest.extend(generated)
        self._digest = digest
        self.turns.append(turn)
        self.tokens = prompt + generated
        return turn
