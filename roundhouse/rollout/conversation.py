"""A rollout's conversation as it grows: chat messages for the engine, Responses items for the record, turns for training.

Invariant: each reply and each tool output is converted once, when it comes; nothing is re-converted or copied on later turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundhouse.environments.base import TaskRow
from roundhouse.generation.protocol import Completion
from roundhouse.rollout.failures import BadCompletion, BadTaskRow
from roundhouse.rollout.responses import (
    Item,
    Message,
    assistant_items,
    chat_messages,
    chat_tools,
    function_call_output,
    tool_message,
)
from roundhouse.rollout.turns import TurnChain


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
