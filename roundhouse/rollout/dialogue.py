"""A conversation with the policy inside a budget of tokens: what the loops of all protocols share.

Invariant: no call is made with more `max_new_tokens` than the rollout has room for, and each has a seed of its own, derived
from the rollout's; a reply that does not fit says so in `limit`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.generation.protocol import Completion, ContextOverflow
from roundhouse.rollout.attempt import Attempt
from roundhouse.rollout.conversation import Conversation
from roundhouse.rollout.responses import Item, response_object
from roundhouse.rollout.sampling_overrides import sampling_overrides
from roundhouse.trajectories.tokens import derive_seed


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the policy."""

    items: list[Item]
    calls: list[dict[str, Any]]
    """Tool calls in chat shape, in order."""
    limit: str
    """`length` or `max_tokens` when such a limit cut the reply or leaves nothing after it; else empty."""
    completion: Completion


class Dialogue:
    """The conversation of one attempt."""

    def __init__(self, attempt: Attempt) -> None:
        """
        Raises:
            BadTaskRow, UnsupportedItem: the row cannot be used.
        """
        rollout = attempt.rollout
        self.conversation = Conversation(rollout.task, f"msg_{rollout.seed:08x}")
        rollout.items, rollout.turns = self.conversation.items, self.conversation.turns
        self.terms = sampling_overrides(self.conversation.params, attempt.sampling, attempt.on_policy)
        if not self.terms.tools:
            self.conversation.tools = []
        self._attempt = attempt

    def offer(self, tools: Sequence[dict[str, Any]]) -> None:
        """Show the policy more tools than its row has; they join the row on record."""
        shown, rollout = self.conversation.tools, self._attempt.rollout
        self.conversation.offer(tools)
        if not self.terms.tools:
            self.conversation.tools = shown
        rollout.task = {**rollout.task, "responses_create_params": self.conversation.params}

    async def ask(self) -> Reply | None:
        """The policy's next reply, recorded. None: the conversation has outgrown the model's context.

        Raises:
            ContextOverflow: already the task does not fit, and that is not to be judged.
            InfraError, DataError: the engine failed or refused.
        """
        conversation, limit = self.conversation, self._attempt.config.max_tokens
        room = limit - len(conversation.chain.tokens)
        try:
            completion = await self._complete(len(conversation.turns), room)
        except ContextOverflow:
            if not conversation.turns:
                if not self._attempt.judges_overflow:
                    raise
                conversation.add_empty_reply()
            return None
        begun = len(conversation.items)
        calls = conversation.add_reply(completion)
        used, cut_short = len(conversation.chain.tokens), completion.finish_reason == "length"
        reached = ""
        if used > limit or (used == limit and (calls or cut_short)):
            reached = "max_tokens"
        elif cut_short:
            reached = "max_tokens" if room < self.terms.sampling.max_new_tokens else "length"
        return Reply(conversation.items[begun:], calls, reached, completion)

    async def _complete(self, turn: int, room: int) -> Completion:
        sampling = self.terms.sampling
        if room < sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        begun = time.perf_counter()
        try:
            return await self._attempt.policy.complete(
                self.conversation.messages,
                self.conversation.tools,
                sampling,
                derive_seed(self._attempt.rollout.seed, turn),
            )
        finally:
            self._attempt.rollout.generation_seconds += time.perf_counter() - begun

    def response(self, finish: str) -> dict[str, Any]:
        """Everything the policy and the environment added, as one Responses object."""
        conversation, rollout = self.conversation, self._attempt.rollout
        self._attempt.call_ends = conversation.call_ends
        return response_object(
            f"resp_{rollout.seed:08x}",
            conversation.output,
            model="policy",
            created_at=rollout.started_at,
            finish_reason="length" if finish in ("length", "max_tokens") else "stop",
            input_tokens=conversation.input_tokens,
            output_tokens=conversation.output_tokens,
            params=conversation.params,
        )

    def response_of(self, reply: Reply) -> dict[str, Any]:
        """One reply alone as a Responses object."""
        rollout, completion = self._attempt.rollout, reply.completion
        return response_object(
            f"resp_{rollout.seed:08x}_{len(rollout.turns) - 1}",
            reply.items,
            model="policy",
            created_at=rollout.started_at,
            finish_reason=completion.finish_reason,
            input_tokens=len(completion.prompt_token_ids),
            output_tokens=len(completion.generation_token_ids),
            params=self.conversation.params,
        )
