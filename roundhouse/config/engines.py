"""Facts of the engines that `generation.backend` chooses, known before their libraries are imported.

Invariant: no other module tests an engine by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundhouse import plugins


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Traits of a plug-in of the role `engine`."""

    opener: str | Callable[..., Any] | None = None
    """Function of (section `generation`, model directory, served name, codec) that returns the engine of a run, not started;
    it receives the sampling with each request. None: the plug-in's `GenerationInterface` answers in batches, and is made for
    `generation.sampling`."""
    in_flow: bool = False
    """The flow's own process serves it."""
    train_service: str | None = None
    """Kind of the train service whose weights it draws from, so that weights do not move."""
    reads_images: bool = False
    """It answers messages with images (`generation.images`)."""
    arguments: frozenset[str] | None = frozenset()
    """Names that `generation.engine_args` accepts; None: vLLM's."""
    refusal: str = "a custom engine takes none."
    """The reason why another name is refused."""


VLLM = EngineTraits("roundhouse.generation.engines:open_vllm", reads_images=True, arguments=None)
TRANSFORMERS = EngineTraits(
    "roundhouse.generation.engines:open_transformers",
    reads_images=True,
    arguments=frozenset(("max_num_seqs",)),
    refusal="the transformers backend knows only max_num_seqs.",
)
OPENAI = EngineTraits("roundhouse.generation.engines:open_server", in_flow=True, refusal="the server has its own.")
TRAINER = EngineTraits(
    "roundhouse.generation.engines:open_trainer",
    in_flow=True,
    train_service="resident",
    arguments=frozenset(("max_num_seqs",)),
    refusal="the trainer backend knows only max_num_seqs.",
)


def engine_traits(backend: object) -> EngineTraits:
    """Return the traits of `generation.backend`; the default ones for a class named by `module:Class`.

    Raises:
        ConfigError: the package of a plug-in cannot be imported.
    """
    if backend not in plugins.names("engine"):
        return EngineTraits()
    return plugins.traits("engine", str(backend)) or EngineTraits()
