"""The model calls of a program or worker that plays a rollout: each is recorded as a turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import orjson

from roundhouse.config.models import Sampling
from roundhouse.errors import InfraError
from roundhouse.generation.protocol import TOKEN_FIELDS, Completion, ContextOverflow
from roundhouse.images import image_names
from roundhouse.rollout.agents import RolloutAttempt
from roundhouse.rollout.conversation import TurnChain, sampling_overrides
from roundhouse.rollout.protocol import retry_delay
from roundhouse.rollout.responses import (
    Item,
    Message,
    assistant_items,
    function_call_output,
    item_content,
    response_object,
)
from roundhouse.trajectories.records import Rollout, derive_seed


class RolloutLimit(Exception):
    """No further call is possible; the text is the limit: max_turns or max_tokens. A worker may end its run with it."""


class LlmClient:
    """Client for the model calls of one rollout's worker; it records them as turns.

    Invariants: every call respects the rollout's limits, uses its own seed, and becomes a turn with its tokens. A
    history that continues an earlier call (the same messages and the unchanged reply) is sent with that call's tokens,
    so that the prompt begins with exactly these tokens. Any other history begins a new root.

        answer = await llm.completion("What is 3*4?")   ->  {"prompt", "response", "finish_reason"}
        answer = await llm.generate(messages, tools)    ->  {"messages", "response", "tool_calls", "finish_reason", "message"}
        messages.append(answer["message"])                  the reply, to continue with
    """

    def __init__(self, attempt: RolloutAttempt, max_retries: int = 0) -> None:
        """`max_retries`: how often a call that failed for the engine's sake is made again."""
        self._attempt = attempt
        self._max_retries = max_retries
        self.policy_version = attempt.policy_version
        """Version that answers, if the collector knows it."""
        self._chain = TurnChain()
        self._replies: dict[bytes, Completion] = {}
        """By the conversation that each ended."""
        self._stored_tokens = 0
        self._input_tokens = 0
        self._given: int | None = None
        """Items before the first reply."""
        self.items: list[Item] = []
        self.infos: list[dict[str, Any]] = []
        """One a call: turn, messages, tools, response, tool_calls, finish_reason, prompt_tokens, response_tokens."""
        self.limit = ""
        """Limit that cut the newest reply: `length`, `max_tokens`, or empty."""
        attempt.rollout.turns, attempt.rollout.items = self._chain.turns, self.items
        attempt.call_ends = []

    def play_back(self, played: Rollout) -> None:
        """Take over the turns and items of a recorded rollout."""
        self._attempt.rollout.turns, self._attempt.rollout.items = list(played.turns), list(played.items)

    async def completion(self, prompt: str, **asked: Any) -> dict[str, Any]:
        """Answer a single prompt; `asked` as of `ask`.

        Raises:
            RolloutLimit
            InfraError, DataError: the engine failed or refused.
        """
        answer = await self.generate([{"role": "user", "content": prompt}], **asked)
        return {**asked, "prompt": prompt, "response": answer["response"], "finish_reason": answer["finish_reason"]}

    async def generate(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        stop: str | Sequence[str] | None = None,
        **asked: Any,
    ) -> dict[str, Any]:
        """Answer a conversation (chat messages; tools in chat shape).

        Args:
            stop: the reply ends before the first of these texts. The turn keeps every token that was drawn, so a conversation
                that continues the shortened reply begins a new root.
            asked: as of `ask`. `model` is ignored: the run's policy answers.

        Raises:
            As `completion`.
        """
        sampling = {name: value for name, value in asked.items() if name != "model"}
        completion = await self.ask(messages, tools, **sampling)
        message, finish_reason = completion.message, completion.finish_reason
        text = message.get("content") or ""
        ends = [text.find(each) for each in ([stop] if isinstance(stop, str) else stop or ()) if each in text]
        if ends:
            text, finish_reason, self.limit = text[: min(ends)], "stop", ""
            message = {**message, "content": text}
        return {
            **asked,
            **({} if stop is None else {"stop": stop}),
            "messages": [dict(each) for each in messages],
            "response": text,
            "tool_calls": message.get("tool_calls") or [],
            "finish_reason": finish_reason,
            "message": message,
        }

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Completion:
        """Answer a conversation and put the call on record.

        Args:
            max_tokens: lowers the run's limit of the call.
            temperature, top_p: in training, only those of the run.

        Raises:
            RolloutLimit
            BadTaskRow: training would need another distribution than the one asked for.
            InfraError, DataError: the engine failed or refused.
        """
        history, offered = [dict(message) for message in messages], list(tools)
        params = {"max_output_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        sampling = sampling_overrides(params, self._attempt.sampling, self._attempt.on_policy).sampling
        # Send our newest reply with its tokens if everything before it is unchanged
        known, reply = self._continued(history)
        sent = history
        if reply is not None:
            fields = {name: getattr(reply, name) for name in TOKEN_FIELDS}
            sent = [*history[: known - 1], {**history[known - 1], **fields}, *history[known:]]
        completion = await self._complete(sent, offered, sampling)
        self.record(history, offered, completion)
        return completion

    def record(self, messages: list[Message], tools: list[dict[str, Any]], completion: Completion) -> None:
        """Put a call on record. For calls that were not made through this client: those of a trace."""
        turn = self._chain.add(
            completion.prompt_token_ids,
            completion.generation_token_ids,
            completion.generation_log_probs,
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
            latency_seconds=completion.latency_seconds,
            version_spans=completion.version_spans,
            images=image_names(messages),
        )
        self._stored_tokens += len(turn.prompt_token_ids) + len(turn.generation_token_ids)
        self._input_tokens += len(completion.prompt_token_ids)
        # Messages that this call adds to the conversation that it continues; all messages if it continues none
        added = messages[self._continued(messages)[0] :]
        item_id = f"msg_{self._attempt.rollout.seed:08x}_{len(self._chain.turns) - 1}"
        for place, message in enumerate(added):
            if message["role"] == "assistant":
                items = assistant_items(message, f"{item_id}_{place}")
            elif message["role"] == "tool":
                items = [function_call_output(message["tool_call_id"], message["content"])]
            else:
                items = [{"type": "message", "role": message["role"], "content": item_content(message["content"])}]
            self.items.extend(items)
        if self._given is None:
            self._given = len(self.items)
        self.items.extend(assistant_items(completion.message, item_id))
        self._attempt.call_ends.append(len(self.items) - self._given - 1)
        self._replies[_key([*messages, completion.message])] = completion
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

    async def _complete(self, messages: list[Message], tools: list[dict[str, Any]], sampling: Sampling) -> Completion:
        """Return the engine's answer. A call waits while the engine loads new weights, and is repeated if it fails."""
        attempt, calls = self._attempt, len(self._chain.turns)
        room = attempt.config.max_tokens - self._stored_tokens
        if calls >= attempt.config.max_turns:
            raise RolloutLimit("max_turns")
        if calls and room <= 0:
            raise RolloutLimit("max_tokens")
        if room < sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        start = time.perf_counter()
        seed = derive_seed(attempt.rollout.seed, calls)
        try:
            for failed in range(1, self._max_retries + 1):
                try:
                    return await attempt.policy.complete(messages, tools, sampling, seed)
                except InfraError:
                    await asyncio.sleep(retry_delay(attempt.config.retry, failed, seed))
            return await attempt.policy.complete(messages, tools, sampling, seed)
        except ContextOverflow as error:
            if not calls:
                raise
            raise RolloutLimit("max_tokens") from error
        finally:
            attempt.rollout.generation_seconds += time.perf_counter() - start

    def _continued(self, messages: list[Message]) -> tuple[int, Completion | None]:
        """Return how many of the messages, up to our newest reply, are a recorded conversation, and that reply."""
        for end in range(len(messages), 0, -1):
            if messages[end - 1].get("role") != "assistant":
                continue
            if (reply := self._replies.get(_key(messages[:end]))) is not None:
                return end, reply
        return 0, None


_OF_A_REPLY = ("role", "content", "tool_calls", "reasoning_content", "reasoning")
"""Fields of an assistant message that a prompt can show. Clients return theirs in addition (LiteLLM:
`provider_specific_fields`)."""


def _key(messages: Sequence[Message]) -> bytes:
    """Equal for equal conversations: absent and empty fields apart."""
    return orjson.dumps([_shown_fields(message) for message in messages], option=orjson.OPT_SORT_KEYS)


def _shown_fields(message: Message) -> Message:
    """Return the fields that a prompt can show. A single part of text is the text."""
    names = _OF_A_REPLY if message["role"] == "assistant" else message.keys() - TOKEN_FIELDS
    fields = {name: message[name] for name in names if message.get(name) not in (None, "", [])}
    match fields.get("content"):
        case [{"type": "text", "text": str(text)}]:
            fields["content"] = text
    return fields
