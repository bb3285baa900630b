"""The built-in engines: a function for each that makes it for a run, not started.

Invariant: the libraries of an engine are imported when it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundhouse import plugins
from roundhouse.config.models import GenerationConfig
from roundhouse.generation.protocol import Engine

if TYPE_CHECKING:
    from roundhouse.generation.chat import ChatCodec


def open_vllm(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """Make vLLM's engine."""
    from roundhouse.generation.vllm_engine import VllmEngine

    return VllmEngine(config, model_dir, served_name, sorted(codec.stop_token_ids), codec.images)


def open_transformers(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """Make the engine of plain transformers."""
    from roundhouse.generation.transformers_engine import TransformersEngine

    return TransformersEngine(config, model_dir, codec)


def open_server(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """Make the client of a running server, by the plug-in of its protocol."""
    assert config.endpoint is not None, "refused at load (config.generation)"
    engine: Engine = plugins.factory("endpoint", config.endpoint.kind)(config, codec)
    return engine


def open_trainer(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """Make the engine that draws from the trainer of this process."""
    from roundhouse.generation.trainer_engine import TrainerEngine

    return TrainerEngine(config, model_dir, codec)


def open_batches(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """Make the engine that asks a `GenerationInterface` for batches."""
    from roundhouse.generation.interface_engine import InterfaceEngine

    return InterfaceEngine(config, model_dir, codec)
