"""What an agent needs of a policy: one call, tokens included.

`PolicyClient.complete` takes a conversation and returns the policy's next message together with the exact token IDs. The
invariant of prefix continuation: if an assistant message of the conversation carries the three token fields
(`prompt_token_ids`, `generation_token_ids`, `generation_log_probs`), the prompt of this call begins with exactly
`prompt_token_ids + generation_token_ids` of the newest such message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from roundhouse.config.models import Sampling
from roundhouse.errors import DataError, InfraError

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the policy."""

    message: dict[str, Any]
    """Assistant chat message: role, content (str or None), tool_calls (OpenAI shape, absent when none); no token fields."""
    finish_reason: str
    """stop, tool_calls or length."""
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    policy_version: int
    """The oldest version that drew any of the tokens."""
    latency_seconds: float
    version_spans: list[dict[str, int]] | None = None
    """`[{"version": 3, "tokens": 17}, …]` in order, where a refit came in between; None: all tokens are `policy_version`'s."""


class PolicyClient(Protocol):
    """Anything that answers a conversation: the HTTP client of the served engine, or a scripted one in a test."""

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """Answer `messages` (chat shape; tools in chat shape).

        Raises:
            ContextOverflow: the prompt leaves no room to generate.
            EngineRejected: the engine refuses the request (4xx): a data failure.
            EngineUnreachable, EngineTimeout, EngineFailed, BadReply: infrastructure failures.
        """
        ...


class EngineUnreachable(InfraError):
    """The engine cannot be reached, is full, or is refitting beyond its time limit."""


class EngineFailed(InfraError):
    """An engine answered with a failure of its own, mostly 500: it met a defect, or the request did."""


class BadReply(InfraError):
    """An engine answered 200 with something else than the chat completion that was asked for."""


class EngineTimeout(InfraError):
    """The engine did not answer within the time limit."""


class EngineRejected(DataError):
    """The engine refused the request."""


class ContextOverflow(EngineRejected):
    """The conversation does not fit the model's context. The rollout is truncated, not failed."""
