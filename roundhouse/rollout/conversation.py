"""A rollout's conversation as it grows, and the dialogue with the policy that extends it inside a budget of tokens.

Invariants: each reply and each tool output is converted once, when it comes (chat messages for the engine, Responses items for
the record, turns for training); nothing is converted again or copied on later turns. No call is made with more `max_new_tokens`
than the rollout has room for, and each has a seed of its own, derived from the rollout's; a reply that does not fit says so in
`limit`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import TaskRow
from roundhouse.generation.protocol import Completion, ContextOverflow
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.failures import BadCompletion, BadTaskRow
from roundhouse.rollout.responses import (
    Item,
    Message,
    assistant_items,
    chat_messages,
    chat_tools,
    function_call_output,
    response_object,
    tool_message,
)
from roundhouse.rollout.sampling_overrides import sampling_overrides
from roundhouse.rollout.turns import TurnChain
from roundhouse.trajectories.tokens import derive_seed


class Conversation:
    """Begins with a task row's input; grows by replies and tool outputs."""

    def __init__(self, row: TaskRow, item_id: str) -> None:
        """`item_id` begins the ids of this conversation's items.

        Raises:
            BadTaskRow, UnsupportedItem: the row's input or tools cannot be used.
        """
        try:
            params = row["responses_create_params"]
            given = params["input"]
            self.messages: list[Message] = chat_messages(given, params.get("instructions"))
            self.tools = chat_tools(params.get("tools") or [])
            told = [{"role": "user", "content": given}] if isinstance(given, str) else given
            self.items: list[Item] = [{"type": "message", **item} for item in told]
        except (KeyError, TypeError, AttributeError) as error:
            raise BadTaskRow(f"responses_create_params is malformed: {error!r}") from error
        self.params: dict[str, Any] = params
        self.chain = TurnChain()
        self.turns = self.chain.turns
        self.input_tokens = 0
        self.output_tokens = 0
        self.call_ends: list[int] = []
        """For each model call, the index of its last item in `output`."""
        self._newest: tuple[int, Message] | None = None
        """Index of the newest reply in `messages`, and the reply without its tokens."""
        self._given = len(self.items)
        self._item_id = item_id

    def offer(self, tools: Sequence[dict[str, Any]]) -> None:
        """Add tools to those of the row.

        Raises:
            UnsupportedItem: one of them cannot be used.
        """
        self.params = {**self.params, "tools": [*(self.params.get("tools") or []), *tools]}
        self.tools = [*self.tools, *chat_tools(list(tools))]

    @property
    def output(self) -> list[Item]:
        """The new items of all turns."""
        return self.items[self._given :]

    def add_reply(self, completion: Completion) -> list[dict[str, Any]]:
        """Record a model call; the tool calls that it asks for, in order.

        Raises:
            BadCompletion: the engine's answer is malformed.
        """
        if completion.finish_reason not in ("stop", "tool_calls", "length"):
            raise BadCompletion(
                f"The engine ended a reply with finish_reason {completion.finish_reason!r}, which is none of stop, "
                "tool_calls and length."
            )
        try:
            self.chain.add(
                completion.prompt_token_ids,
                completion.generation_token_ids,
                completion.generation_log_probs,
                policy_version=completion.policy_version,
                finish_reason=completion.finish_reason,
                latency_seconds=completion.latency_seconds,
                version_spans=completion.version_spans,
            )
            self.items += assistant_items(completion.message, f"{self._item_id}_{len(self.turns) - 1}")
            calls = completion.message.get("tool_calls") or []
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BadCompletion(f"The engine's answer is malformed: {error!r}") from error
        self.input_tokens += len(completion.prompt_token_ids)
        self.output_tokens += len(completion.generation_token_ids)
        self._append(completion)
        self.call_ends.append(len(self.items) - self._given - 1)
        return calls

    def add_empty_reply(self) -> None:
        """What stands for a reply that the model's context had no room for."""
        self.items += assistant_items({"content": ""}, f"{self._item_id}_0")

    def _append(self, completion: Completion) -> None:
        """The reply as the next call's history. Only the newest carries its tokens, which hold all earlier ones: to carry
        them on every reply would cost memory that grows with the square of the turns."""
        if self._newest is not None:
            index, bare = self._newest
            self.messages[index] = bare
        self._newest = (len(self.messages), completion.message)
        self.messages.append(
            {
                **completion.message,
                "prompt_token_ids": completion.prompt_token_ids,
                "generation_token_ids": completion.generation_token_ids,
                "generation_log_probs": completion.generation_log_probs,
            }
        )

    def add_tool_output(self, call_id: str, text: str) -> None:
        self.messages.append(tool_message(call_id, text))
        self.items.append(function_call_output(call_id, text))

    def add_observation(self, text: str) -> None:
        """A user message. Before the first reply it belongs to the input, later to what the rollout added."""
        self.messages.append({"role": "user", "content": text})
        self.items.append({"type": "message", "role": "user", "content": text})
        if not self.turns:
            self._given = len(self.items)


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

    def __init__(self, attempt: RolloutAttempt) -> None:
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
