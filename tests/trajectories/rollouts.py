"""Builds correct rollouts for tests to break."""

from __future__ import annotations

from collections.abc import Sequence

from roundhouse.trajectories.records import Rollout, Status, Turn, digest_tokens


def turn(index: int, before: Sequence[int], new: Sequence[int], generated: Sequence[int], version: int = 0) -> Turn:
    """A turn that continues `before` (everything up to and including the parent's generation)."""
    prompt = [*before, *new]
    return Turn(
        turn=index,
        parent=index - 1 if before else None,
        prompt_token_ids=list(new),
        prompt_length=len(prompt),
        prompt_digest=digest_tokens(prompt),
        generation_token_ids=list(generated),
        generation_log_probs=[-0.5] * len(generated),
        policy_version=version,
        finish_reason="stop",
        latency_seconds=0.01,
    )


def rollout(
    group: str = "g", sample: int = 0, reward: float | None = 1.0, status: Status = Status.COMPLETED
) -> Rollout:
    """Two turns: [1,2]→[3,4], then [5]→[6]."""
    first = turn(0, [], [1, 2], [3, 4])
    second = turn(1, [1, 2, 3, 4], [5], [6])
    return Rollout(
        group_id=group,
        sample=sample,
        task={"task_id": group},
        environment="test",
        status=status,
        reward=reward,
        items=[{"role": "user", "content": "hi"}],
        turns=[first, second],
        finish_reason="stop",
    )
