"""A worker's model calls, recorded as turns while they are made.

Invariants: every call is drawn within the rollout's limits, with a seed of its own, and becomes a turn with its tokens; a
history that continues an earlier call's (its messages and its reply, unchanged) is sent with that call's tokens, so that the
prompt begins with exactly them; any other history begins a new root.

    answer = await llm.completion("What is 3*4?")   ->  {"prompt", "response", "finish_reason"}
    answer = await llm.generate(messages, tools)    ->  {"messages", "response", "tool_calls", "finish_reason", "message"}
    messages.append(answer["message"])                  the reply, to continue with
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from roundhouse.generation.protocol import TOKEN_FIELDS, Completion, ContextOverflow
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.responses import Item, Message, assistant_items, function_call_output, response_object
from roundhouse.rollout.turns import TurnChain
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.tokens import derive_seed


class RolloutLimit(Exception):
    """No further call is possible; the text is the limit: max_turns or max_tokens. A worker may end its run with it."""


class LlmClient:
    """The policy, as one rollout's worker sees it."""

    def __init__(self, attempt: RolloutAttempt) -> None:
        self._attempt = attempt
        self.policy_version = attempt.policy_version
        """Version that answers, where the collector was told."""
        self._chain = TurnChain()
        self._replies: dict[bytes, Completion] = {}
        """By the conversation that each ended."""
        self._newest: list[Message] = []
        self._stored_tokens = 0
        self._input_tokens = 0
        self._given: int | None = None
        """Items before the first reply."""
        self.items: list[Item] = []
        self.infos: list[dict[str, Any]] = []
        """One a call: turn, messages, tools, response, tool_calls, finish_reason, prompt_tokens, response_tokens."""
        self.limit = ""
        """What cut the newest reply short: `length`, `max_tokens`, or empty."""
        attempt.rollout.turns, attempt.rollout.items = self._chain.turns, self.items
        attempt.call_ends = []

    def play_back(self, played: Rollout) -> None:
        """Take over the turns and items of a recorded rollout."""
        self._attempt.rollout.turns, self._attempt.rollout.items = list(played.turns), list(played.items)

    async def completion(self, prompt: str) -> dict[str, Any]:
        """Answer a single prompt.

        Raises:
            RolloutLimit
            InfraError, DataError: the engine failed or refused.
        """
        told = await self.generate([{"role": "user", "content": prompt}])
        return {"prompt": prompt, "response": told["response"], "finish_reason": told["finish_reason"]}

    async def generate(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Answer a conversation (chat messages; tools in chat shape).

        Raises:
            As `completion`.
        """
        history, offered = [dict(message) for message in messages], list(tools)
        completion = await self._complete(self._with_tokens(history), offered)
        self.record(history, offered, completion)
        return {
            "messages": history,
            "response": completion.message.get("content") or "",
            "tool_calls": completion.message.get("tool_calls") or [],
            "finish_reason": completion.finish_reason,
            "message": completion.message,
        }

    def record(self, messages: list[Message], tools: list[dict[str, Any]], completion: Completion) -> None:
        """Put a call on record. For calls that were not made through this client: those of a trace."""
        turn = self._chain.add(
            completion.prompt_token_ids,
            completion.generation_token_ids,
            completion.generation_log_probs,
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
            latency_seconds=completion.latency_seconds,
        )
        self._replies[_key([*messages, completion.message])] = completion
        self._stored_tokens += len(turn.prompt_token_ids) + len(turn.generation_token_ids)
        self._input_tokens += len(completion.prompt_token_ids)
        self._record_items(messages, completion.message)
        self.infos.append(
            {
                "turn": turn.turn,
                "messages": messages,
                "tools": tools,
                "response": completion.message.get("content") or "",
                "tool_calls": completion.message.get("tool_calls") or [],
                "finish_reason": completion.finish_reason,
                "prompt_tokens": len(completion.prompt_token_ids),
                "response_tokens": len(completion.generation_token_ids),
            }
        )
        self.limit = ""
        if completion.finish_reason == "length":
            full = self._stored_tokens >= self._attempt.config.max_tokens
            self.limit = "max_tokens" if full else "length"

    def response(self, finish: str) -> dict[str, Any]:
        """All items after the first prompt, as one Responses object."""
        rollout = self._attempt.rollout
        return response_object(
            f"resp_{rollout.seed:08x}",
            self.items[self._given or 0 :],
            model="policy",
            created_at=rollout.started_at,
            finish_reason="length" if finish in ("length", "max_tokens") else "stop",
            input_tokens=self._input_tokens,
            output_tokens=sum(len(turn.generation_token_ids) for turn in self._chain.turns),
            params=rollout.task["responses_create_params"],
        )

    async def _complete(self, messages: list[Message], tools: list[dict[str, Any]]) -> Completion:
        attempt, calls = self._attempt, len(self._chain.turns)
        room = attempt.config.max_tokens - self._stored_tokens
        if calls >= attempt.config.max_turns:
            raise RolloutLimit("max_turns")
        if calls and room <= 0:
            raise RolloutLimit("max_tokens")
        sampling = attempt.sampling
        if room < sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        begun = time.perf_counter()
        try:
            return await attempt.policy.complete(messages, tools, sampling, derive_seed(attempt.rollout.seed, calls))
        except ContextOverflow as error:
            if not calls:
                raise
            raise RolloutLimit("max_tokens") from error
        finally:
            attempt.rollout.generation_seconds += time.perf_counter() - begun

    def _with_tokens(self, messages: list[Message]) -> list[Message]:
        """The messages, the newest reply of ours among them with its tokens, if everything before it is as it was."""
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].get("role") != "assistant":
                continue
            known = self._replies.get(_key(messages[: index + 1]))
            if known is not None:
                fields = {name: getattr(known, name) for name in TOKEN_FIELDS}
                return [*messages[:index], {**messages[index], **fields}, *messages[index + 1 :]]
        return messages

    def _record_items(self, messages: list[Message], reply: Message) -> None:
        """What this call adds to the newest conversation; all of it where it is another one."""
        known = len(self._newest)
        added = messages[known:] if known and _key(messages[:known]) == _key(self._newest) else messages
        item_id = f"msg_{self._attempt.rollout.seed:08x}_{len(self._chain.turns) - 1}"
        for place, message in enumerate(added):
            self.items.extend(_items(message, f"{item_id}_{place}"))
        if self._given is None:
            self._given = len(self.items)
        self.items.extend(assistant_items(reply, item_id))
        self._attempt.call_ends.append(len(self.items) - self._given - 1)
        self._newest = [*messages, reply]


def _items(message: Message, item_id: str) -> list[Item]:
    if message["role"] == "assistant":
        return assistant_items(message, item_id)
    if message["role"] == "tool":
        return [function_call_output(message["tool_call_id"], message["content"])]
    return [{"type": "message", "role": message["role"], "content": message["content"]}]


def _key(messages: Sequence[Message]) -> bytes:
    """Equal for equal conversations: absent and empty fields apart."""
    bare = [
        {name: value for name, value in message.items() if value not in (None, "", []) and name not in TOKEN_FIELDS}
        for message in messages
    ]
    return orjson.dumps(bare, option=orjson.OPT_SORT_KEYS)
