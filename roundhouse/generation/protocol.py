"""What an agent needs of a policy (one call, tokens included), and what the server needs of an inference engine.

`PolicyClient.complete` takes a conversation and returns the policy's next message together with the exact token IDs. The
invariant of prefix continuation: if an assistant message of the conversation carries the three token fields
(`prompt_token_ids`, `generation_token_ids`, `generation_log_probs`), the prompt of this call begins with exactly
`prompt_token_ids + generation_token_ids` of the newest such message.

`Engine`: token IDs in, token IDs and log-probabilities out. Invariant: an engine holds exactly one whole set of weights, or
none, or is poisoned. `load_weights` either ends with the new weights whole and verified, or raises: `WeightsRefused` when the
engine was not touched (it still holds what it held before), anything else when the engine may hold a mixture and must be
restarted. No `generate` outlives its engine's weights unnoticed: it ends with the versions that drew its tokens, or with
`GenerationAborted`.

Text, chat templates and tools are not an engine's business; see `chat.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

from roundhouse.config.generation import InflightRequests
from roundhouse.config.models import Sampling
from roundhouse.errors import DataError, InfraError, RoundhouseError

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
SESSION_HEADER = "X-Session-Id"
"""Calls with the same value go to one replica, as long as it runs. The name is Ray Serve's default for it."""


def session_header(session: str) -> dict[str, str]:
    """The header of a session's calls, ASCII without white space whatever the session is called. Of a rollout's id the number
    of the sample stays at the end, by which proxies spread the samples of a group over the replicas."""
    return {SESSION_HEADER: quote(session)}


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


@runtime_checkable
class ReplicatedPolicy(PolicyClient, Protocol):
    """A policy of several replicas, each with a prefix cache of its own."""

    def for_rollout(self, rollout_id: str) -> PolicyClient:
        """The same policy, for the calls of one rollout: they go to one replica as long as it runs, then to another one."""
        ...


def policy_of(rollout_id: str, policy: PolicyClient) -> PolicyClient:
    """The policy for the calls of one rollout, of whichever kind it is."""
    return policy.for_rollout(rollout_id) if isinstance(policy, ReplicatedPolicy) else policy


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


AsgiApp = Callable[[dict[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens of one answer are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens. None draws from the engine's own state."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer in tokens. The end-of-turn token, when one was drawn, is the last of `token_ids`."""

    token_ids: list[int]
    log_probs: list[float]
    """Natural logarithms under the distribution that was sampled from, one a token; none of an engine that has none, whose
    answers are not trained on."""
    finish_reason: str
    """stop or length."""
    versions: list[tuple[int, int]] | None = None
    """(policy version, tokens that it drew), in order; None: the engine does not report it, and held one version throughout."""
    cached_tokens: int | None = None
    """Tokens of the prompt that its prefix cache held; None: the engine does not report it."""


class GenerationAborted(RoundhouseError):
    """New weights came while the answer was drawn, and running generations were not to be kept: ask again."""


class WeightsRefused(DataError):
    """The weights are missing, damaged or of another model; the engine was not touched."""


class EnginePoisoned(RoundhouseError):
    """The engine holds a mixture of weights or has died. Only a restart helps."""


class Engine(Protocol):
    """An inference engine behind the chat server. All methods run on the server's event loop."""

    max_model_len: int
    """Prompt and generation together, in tokens."""

    async def start(self) -> None:
        """Become able to take weights. Called once, before anything else."""
        ...

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """Answer a prompt. Cancelling the call stops the generation."""
        ...

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Replace the weights by those of a Hugging Face directory. The caller lets no request in meanwhile.

        Args:
            version: what tokens drawn from now on are labelled with.
            running: drain: the caller has waited, none runs. continue: those that run resume with the new weights, and on
                what the new weights make of their tokens so far. restart: they end with `GenerationAborted`.
            keep_prefix_cache: keys and values computed by the old weights stay in use, also those of running generations.

        After a failure no generation of before is running any more.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, each given those before it, at temperature 1."""
        ...

    async def sleep(self) -> None:
        """Give back the memory of weights, keys and values. No generation runs, and none begins before `wake`."""
        ...

    async def wake(self) -> None:
        """Become able to take weights again; those of before are gone, and `load_weights` follows."""
        ...

    async def check_health(self) -> None:
        """Raise when the engine is dead."""
        ...

    def openai_app(self) -> AsgiApp | None:
        """The engine's own OpenAI routes, served for every path that is not ours."""
        ...

    def shutdown(self) -> None:
        """Release memory and processes."""
        ...
