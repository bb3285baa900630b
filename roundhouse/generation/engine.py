"""What the server needs of an inference engine: token IDs in, token IDs and log-probabilities out.

Invariant: an engine holds exactly one whole set of weights, or none, or is poisoned. `load_weights` either ends with the new
weights whole and verified, or raises: `WeightsRefused` when the engine was not touched (it still holds what it held before),
anything else when the engine may hold a mixture and must be restarted.

Text, chat templates and tools are not an engine's business; see `chat.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roundhouse.errors import DataError, RoundhouseError

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
    """Natural logarithms under the distribution that was sampled from, one a token."""
    finish_reason: str
    """stop or length."""


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

    async def load_weights(self, directory: str) -> None:
        """Replace the weights by those of a Hugging Face directory. The caller lets no request in meanwhile."""
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
