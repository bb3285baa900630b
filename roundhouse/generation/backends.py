"""Backends by name.

Invariant: this is the only place that chooses between engines; everything above speaks to `Engine` or `GenerationInterface`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ToolParser, parse_hermes
from roundhouse.generation.engine import Engine

if TYPE_CHECKING:
    from roundhouse.generation.chat import ChatCodec


def make_engine(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
    """The engine that `config.backend` names, not started."""
    if config.backend == "transformers":
        from roundhouse.generation.transformers_engine import TransformersEngine

        return TransformersEngine(config, model_dir, served_name, codec)
    from roundhouse.generation.vllm_engine import VllmEngine

    return VllmEngine(config, model_dir, served_name, sorted(codec.stop_token_ids))


def make_tool_parser(config: GenerationConfig, tokenizer: Any) -> ToolParser:
    """The tool-call parser for `config`: vLLM's by name, or the hermes reading where there is no vLLM."""
    if config.backend == "transformers":
        return parse_hermes
    from roundhouse.generation.vllm_engine import tool_parser

    return tool_parser(config.tool_call_parser, tokenizer)


def environment(config: GenerationConfig) -> dict[str, str]:
    """Environment variables of a process that runs the engine."""
    from roundhouse.generation.vllm_engine import environment as vllm_environment

    return vllm_environment(config)
