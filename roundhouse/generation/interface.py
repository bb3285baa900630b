"""Generation on batches of tensors: the interface that every backend offers, without server or tokenizer.

Invariant: only tokens go in and come out, right-padded; so training and generation can never disagree about a tokenizer. The
built-in backends (vLLM's `LLM` and plain transformers, in this process) load weights as the served engines do.
`prepare_for_generation` and `finish_generation` may be called any number of times: the second call in a row does nothing.

A backend of your own is a class with three methods, `generate`, `prepare_for_generation` and `finish_generation`. A run uses it
by `generation.backend: module:Class` (`roundhouse.generation.interface_engine`), a program by `create_backend`.

    backend = create_backend(configure_generation_config(config, tokenizer), model_dir)
    backend.prepare_for_generation()
    output = backend.generate({"input_ids": …, "attention_mask": …}, greedy=False)
    backend.finish_generation()
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from roundhouse import plugins
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.chat import stop_token_ids
from roundhouse.generation.protocol import Draw, Generated
from roundhouse.generation.weights_probe import require_proofs
from roundhouse.weight_sync.cache import node_cache
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint

if TYPE_CHECKING:
    import torch


class GenerationDatumSpec(TypedDict):
    """Input of a generation."""

    input_ids: torch.Tensor
    """[B, S] token IDs, right-padded."""
    attention_mask: torch.Tensor
    """[B, S], 1 at the tokens of `input_ids`."""
    seeds: NotRequired[Sequence[int]]
    """One a row. The same seed, prompt and weights give the same tokens."""
    __extra__: NotRequired[Any]
    """For a backend's own use. A run gives `max_new_tokens`, a list of one number a row."""


class GenerationOutputSpec(TypedDict):
    """Output of a generation; T is the longest row."""

    output_ids: torch.Tensor
    """[B, T] prompt and generated tokens, right-padded."""
    generation_lengths: torch.Tensor
    """[B] generated tokens, the end-of-turn token included."""
    unpadded_sequence_lengths: torch.Tensor
    """[B] prompt and generated tokens."""
    logprobs: torch.Tensor
    """[B, T] log-probabilities of the generated tokens under the distribution sampled from; 0 on prompt and padding."""
    truncated: NotRequired[torch.Tensor]
    """[B] bool: a limit of tokens ended the row, no end-of-turn token. Left out: rows without one at their end."""
    __extra__: NotRequired[Any]


@dataclass(frozen=True, slots=True)
class TokenizedGeneration:
    """A generation configuration with what only the tokenizer knows."""

    config: GenerationConfig
    pad_token_id: int
    stop_token_ids: frozenset[int]


def configure_generation_config(config: GenerationConfig, tokenizer: Any) -> TokenizedGeneration:
    """Complete a configuration with the tokenizer's padding and end-of-turn tokens: the same tokens that end an answer
    of a run.

    Raises:
        ConfigError: neither the tokenizer nor its generation_config.json names an end-of-turn token.
    """
    stops = stop_token_ids(tokenizer, tokenizer.name_or_path)
    pad = tokenizer.pad_token_id
    return TokenizedGeneration(config, min(stops) if pad is None else pad, stops)


class GenerationInterface(ABC):
    """A backend. The last two methods may be called any number of times in a row.

    Args:
        tokenized: the configuration, with padding and end-of-turn tokens.
        model_dir: Hugging Face directory of the model.
    """

    def __init__(self, tokenized: TokenizedGeneration, model_dir: str) -> None:
        self.tokenized = tokenized
        self.model_dir = model_dir

    @abstractmethod
    def generate(self, data: GenerationDatumSpec, greedy: bool) -> GenerationOutputSpec:
        """Continue every row of `data`; `greedy` overrides the configured temperature."""

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Load what `generate` needs: the weights of `model_dir`."""

    @abstractmethod
    def finish_generation(self) -> None:
        """Free the memory that `prepare_for_generation` took."""

    def load_weights(self, directory: str) -> None:
        """Replace the weights by those of a Hugging Face directory, and be ready to generate."""
        self.finish_generation()
        self.model_dir = directory
        self.prepare_for_generation()


class ListGeneration(GenerationInterface):
    """A backend that answers lists of prompts; the tensors are handled here, once."""

    def generate(self, data: GenerationDatumSpec, greedy: bool) -> GenerationOutputSpec:
        """Continue every row of `data`; `greedy` overrides the configured temperature.

        Raises:
            ValueError: a row leaves no room to generate in `max_model_len`.
        """
        sampling = self.tokenized.config.sampling
        prompts = unpad(data["input_ids"], data["attention_mask"])
        limit = self.tokenized.config.max_model_len
        if full := [row for row, prompt in enumerate(prompts) if len(prompt) >= limit]:
            raise ValueError(
                f"Rows {full} of input_ids leave no room to generate: generation.max_model_len is {limit}, prompt included. "
                "Raise it, or shorten them."
            )
        seeds: Sequence[int | None] = data.get("seeds") or [None] * len(prompts)
        draws = [
            Draw(
                max_tokens=min(sampling.max_new_tokens, limit - len(prompt)),
                temperature=0.0 if greedy else sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seed,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return pad(prompts, self.answer(prompts, draws), self.tokenized.pad_token_id)

    @abstractmethod
    def answer(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        """Continue each prompt; called between `prepare_for_generation` and `finish_generation`."""


def create_backend(tokenized: TokenizedGeneration, model_dir: str, name: str | None = None) -> GenerationInterface:
    """Return the backend `name` (default: the configured one): built in, of an installed package's entry point, or
    `module:Class`.

    Raises:
        ConfigError: the name is unknown; the text lists the known ones.
    """
    return backend_class(name or tokenized.config.backend)(tokenized, model_dir)


def backend_class(name: str) -> type[GenerationInterface]:
    """Return the class of a backend.

    Raises:
        ConfigError: the name is unknown, or the class lacks a method.
    """
    backend: type[GenerationInterface] = plugins.chosen("engine", name, GenerationInterface, "generation.backend")
    if inspect.isabstract(backend):
        missing = ", ".join(sorted(backend.__abstractmethods__))
        raise ConfigError(f"generation.backend is {name}, which does not define {missing}.")
    return backend


def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """Rows as lists, without padding.

    Raises:
        ValueError: a row is empty or not right-padded.
    """
    lengths = attention_mask.sum(dim=1).long().tolist()
    rows = []
    for row, (ids, length) in enumerate(zip(input_ids.tolist(), lengths, strict=True)):
        if length == 0 or not bool(attention_mask[row, :length].all()):
            raise ValueError(f"Row {row} of attention_mask is empty or not right-padded.")
        rows.append(ids[:length])
    return rows


def pad(prompts: Sequence[Sequence[int]], answers: Sequence[Generated], pad_token_id: int) -> GenerationOutputSpec:
    """Prompts and answers as right-padded tensors."""
    import torch

    totals = [len(prompt) + len(answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    output_ids_BT = torch.full((len(prompts), max(totals)), pad_token_id, dtype=torch.long)
    logprobs_BT = torch.zeros(len(prompts), max(totals))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        output_ids_BT[row, : totals[row]] = torch.tensor([*prompt, *answer.token_ids])
        logprobs_BT[row, len(prompt) : totals[row]] = torch.tensor(answer.log_probs)
    return {
        "output_ids": output_ids_BT,
        "generation_lengths": torch.tensor([len(answer.token_ids) for answer in answers]),
        "unpadded_sequence_lengths": torch.tensor(totals),
        "logprobs": logprobs_BT,
        "truncated": torch.tensor([answer.finish_reason == "length" for answer in answers]),
    }


class TransformersGeneration(ListGeneration):
    """Hugging Face transformers."""

    _model: Any = None
    _weights = ""
    """Last argument of `load_weights`: it is loaded again after `finish_generation`."""

    def prepare_for_generation(self) -> None:
        if self._model is None:
            from roundhouse.generation.transformers_engine import build_model

            self._model = build_model(self.model_dir, self.tokenized.config)
            if self._weights or any(Path(self.model_dir).glob("*.safetensors")):
                self.load_weights(self._weights or self.model_dir)

    def finish_generation(self) -> None:
        self._model = None

    def load_weights(self, directory: str) -> None:
        from roundhouse.generation.transformers_engine import load_into

        self._weights = directory
        if self._model is None:
            self.prepare_for_generation()
        else:
            load_into(self._model, _fetched(directory, self.tokenized.config))

    def answer(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        from roundhouse.generation.transformers_engine import generate_batch

        return generate_batch(self._model, prompts, draws, self.tokenized.stop_token_ids)


class VllmGeneration(ListGeneration):
    """vLLM, offline. After `finish_generation` it holds neither weights nor keys and values: on a GPU the engine
    sleeps; on CPU, where vLLM cannot sleep, it ends, and `prepare_for_generation` starts another."""

    _llm: Any = None
    _ready = False
    _weights = ""
    """Last argument of `load_weights`: it is loaded again after `finish_generation`."""

    def prepare_for_generation(self) -> None:
        if self._ready:
            return
        if self._llm is None:
            self._llm = self._started()
        else:
            self._llm.wake_up()
        self._ready = True
        if self._weights or any(Path(self.model_dir).glob("*.safetensors")):
            self.load_weights(self._weights or self.model_dir)

    def finish_generation(self) -> None:
        if not self._ready:
            return
        self._ready = False
        if self.tokenized.config.gpus_per_replica > 0:
            self._llm.sleep(level=2)
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.collective_rpc("roundhouse_forget")
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()

    def load_weights(self, directory: str) -> None:
        self._weights = directory
        if not self._ready:
            self.prepare_for_generation()
            return
        proofs = self._llm.collective_rpc("roundhouse_load", args=(_fetched(directory, self.tokenized.config),))
        require_proofs(proofs, directory)
        self._llm.reset_prefix_cache()

    def _started(self) -> Any:
        from roundhouse.generation.vllm_engine import (
            allow_proxies,
            engine_arguments,
            environment,
            refuse_broken_extensions,
        )

        config = self.tokenized.config
        refuse_broken_extensions(self.model_dir)
        for key, value in environment(config).items():
            os.environ.setdefault(key, value)
        from vllm import LLM

        allow_proxies()
        return LLM(**engine_arguments(config, self.model_dir) | {"enable_sleep_mode": config.gpus_per_replica > 0})

    def answer(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        from roundhouse.generation.vllm_engine import read_output, sampling_params

        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [sampling_params(draw, sorted(self.tokenized.stop_token_ids)) for draw in draws],
            use_tqdm=False,
        )
        return [read_output(output.outputs[0]) for output in outputs]


def _fetched(uri: str, config: GenerationConfig) -> str:
    directory, entry = fetch_checkpoint(uri, node_cache(int(config.weights_cache_gib * 2**30)))
    if entry is not None:
        entry.release()
    return str(directory)
