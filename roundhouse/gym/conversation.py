"""A rollout's conversation as it grows: chat messages for the engine, Responses items for the record, turns for training.

Invariant: each reply and each tool output is converted once, when it comes; nothing is re-converted or copied on later turns.
A turn stores only the tokens that its prompt adds to everything before it; where a prompt does not begin with those, the turn
is a new root and stores its whole prompt.

    call 0: prompt p0, generates g0        turn(parent=None, new=p0)
    call 1: prompt p0+g0+t, generates g1   turn(parent=0, new=t)
    call 2: prompt q (history re-rendered) turn(parent=None, new=q)
"""

from __future__ import annotations

from typing import Any

from roundhouse.generation.protocol import Completion
from roundhouse.gym.environment import TaskRow
from roundhouse.gym.failures import BadCompletion, BadTaskRow
from roundhouse.gym.responses import (
    Item,
    Message,
    assistant_items,
    chat_messages,
    chat_tools,
    function_call_output,
    tool_message,
)
from roundhouse.trajectories.records import Turn
from roundhouse.trajectories.tokens import digest_tokens


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
        self.turns: list[Turn] = []
        self.tokens: list[int] = []
        """Prompt and generation of the newest call."""
        self.input_tokens = 0
        self.output_tokens = 0
        self._given = len(self.items)
        self._item_id = item_id

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
            self.turns.append(self._turn(completion))
            self.items += assistant_items(completion.message, f"{self._item_id}_{len(self.turns) - 1}")
            calls = completion.message.get("tool_calls") or []
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BadCompletion(f"The engine's answer is malformed: {error!r}") from error
        self.messages.append(
            {
                **completion.message,
                "prompt_token_ids": completion.prompt_token_ids,
                "generation_token_ids": completion.generation_token_ids,
                "generation_log_probs": completion.generation_log_probs,
            }
        )
        return calls

    def add_tool_output(self, call_id: str, text: str) -> None:
        self.messages.append(tool_message(call_id, text))
        self.items.append(function_call_output(call_id, text))

    def _turn(self, completion: Completion) -> Turn:
        prompt, generated = completion.prompt_token_ids, completion.generation_token_ids
        known = len(self.tokens)
        continues = bool(self.turns) and prompt[:known] == self.tokens
        turn = Turn(
            turn=len(self.turns),
            parent=len(self.turns) - 1 if continues else None,
            prompt_token_ids=prompt[known:] if continues else prompt,
            prompt_length=len(prompt),
            prompt_digest=digest_tokens(prompt),
            generation_token_ids=generated,
            generation_log_probs=completion.generation_log_probs,
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
            latency_seconds=completion.latency_seconds,
        )
        self.tokens = prompt + generated
        self.input_tokens += len(prompt)
        self.output_tokens += len(generated)
        return turn
