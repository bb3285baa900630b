"""The built-in backends in this process: vLLM's `LLM` and plain transformers.

Invariant: both load weights the way the served engines do, so what is proved of one holds for the other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.engine import Draw, Generated
from roundhouse.generation.interface import GenerationInterface
from roundhouse.weight_sync.cache import node_cache
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint


class TransformersGeneration(GenerationInterface):
    """Hugging Face transformers."""

    _model: Any = None

    def prepare_for_generation(self) -> None:
        if self._model is None:
            from roundhouse.generation.transformers_engine import build_model

            self._model = build_model(self.model_dir, self.tokenized.config)
            if any(Path(self.model_dir).glob("*.safetensors")):
                self.load_weights(self.model_dir)

    def finish_generation(self) -> None:
        self._model = None

    def load_weights(self, directory: str) -> None:
        from roundhouse.generation.transformers_engine import load_into

        load_into(self._model, _fetched(directory))

    def answer(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        from roundhouse.generation.transformers_engine import generate_batch

        return generate_batch(self._model, prompts, draws, self.tokenized.stop_token_ids)


class VllmGeneration(GenerationInterface):
    """vLLM, offline. The engine stays for the life of the object; `finish_generation` only clears its caches on CPU."""

    _llm: Any = None
    _ready = False

    def prepare_for_generation(self) -> None:
        if self._llm is None:
            self._start()
        self._ready = True

    def _start(self) -> None:
        from roundhouse.generation.vllm_engine import engine_arguments, environment

        for key, value in environment(self.tokenized.config).items():
            os.environ.setdefault(key, value)
        from vllm import LLM

        self._llm = LLM(**engine_arguments(self.tokenized.config, self.model_dir))
        if any(Path(self.model_dir).glob("*.safetensors")):
            self.load_weights(self.model_dir)

    def finish_generation(self) -> None:
        if self._ready:
            self._llm.reset_prefix_cache()
            self._ready = False

    def load_weights(self, directory: str) -> None:
        self._llm.collective_rpc("roundhouse_load", args=(_fetched(directory),))
        self._llm.reset_prefix_cache()

    def answer(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        from roundhouse.generation.vllm_engine import read_output, sampling_params

        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [sampling_params(draw, sorted(self.tokenized.stop_token_ids)) for draw in draws],
            use_tqdm=False,
        )
        return [read_output(output.outputs[0]) for output in outputs]


def _fetched(uri: str) -> str:
    directory, entry = fetch_checkpoint(uri, node_cache(int(GenerationConfig().weights_cache_gib * 2**30)))
    if entry is not None:
        entry.release()
    return str(directory)
