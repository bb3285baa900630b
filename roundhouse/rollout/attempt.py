"""One attempt at a rollout: what an agent is given, and what it leaves.

Invariant: whatever an agent learns goes into the attempt at once, so that a failure keeps it as evidence; the session that it
opened stands in `session` until the rollout's border has closed it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.generation.protocol import TOKEN_FIELDS, PolicyClient
from roundhouse.health.activity import ACTIVITY
from roundhouse.rollout.protocol import Session
from roundhouse.rollout.replay import Tape
from roundhouse.trajectories.records import Rollout

T = TypeVar("T")


@dataclass(slots=True)
class Attempt:
    """The rollout in the making, who answers for the policy, and the limits."""

    rollout: Rollout
    policy: PolicyClient
    config: RolloutConfig
    sampling: Sampling
    on_policy: bool = True
    """The rollout is to be trained on: every token must be drawn as `sampling` says and be known."""
    policy_version: int | None = None
    """Version that the engine was refitted to, for agents whose answers do not tell it."""
    judges_overflow: bool = False
    """A task that does not fit the model's context is an empty reply, which the verifier judges, as NeMo Gym has it. Otherwise
    it is a failure, without a reward."""
    tape: Tape = field(default_factory=Tape)
    """Begins the session, so that what was finished before an interruption is not done again."""
    session: Session | None = None
    """Set by the agent as soon as it has one."""
    response: dict[str, Any] | None = None
    """The Responses object that the verifier judged, without token fields."""
    call_ends: list[int] = field(default_factory=list)
    """For each model call, the index in `response.output` of its last item."""
    answer: dict[str, Any] | None = None
    """The environment's whole answer to /verify, or what it would be."""

    async def in_environment(self, work: Awaitable[T]) -> T:
        """Await the environment, on its account."""
        begun = time.perf_counter()
        try:
            with ACTIVITY.track("environment", "call", where=self.rollout.environment):
                return await work
        finally:
            self.rollout.environment_seconds += time.perf_counter() - begun

    @property
    def token_marks(self) -> list[tuple[int, dict[str, Any]]]:
        """For each model call: the index in `response.output` of its last item, and its token fields (whole prompts)."""
        marks: list[tuple[int, dict[str, Any]]] = []
        whole: list[list[int]] = []
        for index, turn in zip(self.call_ends, self.rollout.turns, strict=False):
            prompt = ([] if turn.parent is None else whole[turn.parent]) + turn.prompt_token_ids
            whole.append(prompt + turn.generation_token_ids)
            if not turn.generation_token_ids:
                continue  # an engine that tells no tokens
            fields = (prompt, turn.generation_token_ids, turn.generation_log_probs)
            marks.append((index, dict(zip(TOKEN_FIELDS, fields, strict=True))))
        return marks

    def response_with_tokens(self) -> dict[str, Any] | None:
        """The Responses object with the three token fields on the last item of each model call, as agents pass it on."""
        if self.response is None:
            return None
        output = list(self.response["output"])
        for index, fields in self.token_marks:
            output[index] = {**output[index], **fields}
        return {**self.response, "output": output}
