"""Generation on batches of tensors: the interface that every backend offers, without server or tokenizer.

Invariant: only tokens go in and come out, right-padded; so training and generation can never disagree about a tokenizer. The
built-in backends (vLLM's `LLM` and plain transformers, in this process) load weights as the served engines do.
`prepare_for_generation` and `finish_generation` may be called any number of times: the second call in a row does nothing.

    backend = create_backend(configure_generation_config(config, tokenizer), model_dir)
    backend.prepare_for_generation()
    output = backend.generate({"input_ids": …, "attention_mask": …}, greedy=False)
    backend.finish_generation()
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import Draw, Generated
from roundhouse.weight_sync.cache import node_cache
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint

if TYPE_CHECKING:
    import torch


ENTRY_POINTS = "roundhouse.backends"
BUILT_IN = {
    "vllm": "roundhouse.generation.interface:VllmGeneration",
    "transformers": "roundhouse.generation.interface:TransformersGeneration",
}


class GenerationDatumSpec(TypedDict):
    """What is generated from."""

    input_ids: torch.Tensor
    """[B, S] token IDs, right-padded."""
    attention_mask: torch.Tensor
    """[B, S], 1 where `input_ids` holds a token."""
    seeds: NotRequired[Sequence[int]]
    """One a row. The same seed, prompt and weights give the same tokens."""
    __extra__: NotRequired[Any]
    """For a backend's own use."""


class GenerationOutputSpec(TypedDict):
    """What was generated; T is the longest row."""

    output_ids: torch.Tensor
    """[B, T] prompt and generated tokens, right-padded."""
    generation_lengths: torch.Tensor
    """[B] generated tokens, the end-of-turn token included."""
    unpadded_sequence_lengths: torch.Tensor
    """[B] prompt and generated tokens."""
    logprobs: torch.Tensor
    """[B, T] log-probabilities of the generated tokens under the distribution sampled from; 0 on prompt and padding."""
    __extra__: NotRequired[Any]


@dataclass(frozen=True, slots=True)
class TokenizedGeneration:
    """A generation configuration with what only the tokenizer knows."""

    config: GenerationConfig
    pad_token_id: int
    stop_token_ids: frozenset[int]


def configure_generation_config(
    config: GenerationConfig, tokenizer: Any, stop_token_ids: Sequence[int] = ()
) -> TokenizedGeneration:
    """Complete a configuration with the tokenizer's padding and end-of-turn tokens.

    Raises:
        ConfigError: the tokenizer has no end-of-turn token and none is given.
    """
    eos = tokenizer.eos_token_id
    stops = frozenset({*stop_token_ids, *([] if eos is None else [eos])})
    if not stops:
        raise ConfigError("The tokenizer has no end-of-turn token (eos_token). Set it in tokenizer_config.json.")
    pad = tokenizer.pad_token_id
    return TokenizedGeneration(config, min(stops) if pad is None else pad, stops)


class GenerationInterface(ABC):
    """A backend. Subclasses answer lists of prompts; the tensors are handled here, once."""

    def __init__(self, tokenized: TokenizedGeneration, model_dir: str) -> None:
        self.tokenized = tokenized
        self.model_dir = model_dir

    def generate(self, data: GenerationDatumSpec, greedy: bool) -> GenerationOutputSpec:
        """Continue every row of `data`; `greedy` overrides the configured temperature."""
        sampling = self.tokenized.config.sampling
        prompts = unpad(data["input_ids"], data["attention_mask"])
        seeds: Sequence[int | None] = data.get("seeds") or [None] * len(prompts)
        draws = [
            Draw(
                max_tokens=min(sampling.max_new_tokens, self.tokenized.config.max_model_len - len(prompt)),
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

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Load what `generate` needs."""

    @abstractmethod
    def finish_generation(self) -> None:
        """Give back the memory that `prepare_for_generation` took."""

    @abstractmethod
    def load_weights(self, directory: str) -> None:
        """Replace the weights by those of a Hugging Face directory."""


def create_backend(tokenized: TokenizedGeneration, model_dir: str, name: str | None = None) -> GenerationInterface:
    """The backend `name` (default: the configured one), built in or of an installed package's entry point.

    Raises:
        ConfigError: there is none of this name; the text lists those there are.
    """
    name = name or tokenized.config.backend
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | BUILT_IN
    if name not in found:
        raise ConfigError(
            f"There is no generation backend {name!r}; there are {', '.join(sorted(found))}. Packages add theirs by the "
            f"entry-point group {ENTRY_POINTS}."
        )
    from pkgutil import resolve_name

    backend: GenerationInterface = resolve_name(found[name])(tokenized, model_dir)
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
    }


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

        load_into(self._model, _fetched(directory, self.tokenized.config))

    def answer(self, prompts: list[list[int]], draws: list[Draw]) -> list[Generated]:
        from roundhouse.generation.transformers_engine import generate_batch

        return generate_batch(self._model, prompts, draws, self.tokenized.stop_token_ids)


class VllmGeneration(GenerationInterface):
    """vLLM, offline. The engine stays for the life of the object; `finish_generation` only clears its caches on CPU."""

    _llm: Any = None
    _ready = False

    def prepare_for_generation(self) -> None:
        if self._llm is None:
            from roundhouse.generation.vllm_engine import allow_proxies, engine_arguments, environment

            for key, value in environment(self.tokenized.config).items():
                os.environ.setdefault(key, value)
            from vllm import LLM

            allow_proxies()
            self._llm = LLM(**engine_arguments(self.tokenized.config, self.model_dir))
            if any(Path(self.model_dir).glob("*.safetensors")):
                self.load_weights(self.model_dir)
        self._ready = True

    def finish_generation(self) -> None:
        if self._ready:
            self._llm.reset_prefix_cache()
            self._ready = False

    def load_weights(self, directory: str) -> None:
        self._llm.collective_rpc("roundhouse_load", args=(_fetched(directory, self.tokenized.config),))
        self._llm.reset_prefix_cache()

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
