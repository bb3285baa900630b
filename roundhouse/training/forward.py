"""Log-probabilities of the trained tokens, from a model and a microbatch.

Invariant: logits exist only at the positions that predict a trained token, in float32, divided by the sampling temperature
before the softmax: the distribution that the engine sampled from. No dropout is ever active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from roundhouse.training.attention import PACKED
from roundhouse.training.balance import Dealer
from roundhouse.training.logits import chunked_log_probs
from roundhouse.training.packing import FlatTokens, Microbatch, build_microbatches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a forward pass says of its trained tokens."""

    log_probs: torch.Tensor
    """[M] float32."""
    entropy: torch.Tensor | None
    """[M] float32, when asked for."""


class Scorer(torch.nn.Module):
    """A causal language model together with its loss-side end, from microbatches to log-probabilities.

    One module, so that a model sharded over ranks gathers the output layer for the pass that uses it, whichever way.

    Args:
        temperature: that the sequences were sampled at.
        dtype: bfloat16 runs the model in autocast; the softmax is float32 all the same.
        logits_chunk: rows of logits at a time (`logits`); 0 computes all at once and keeps them for backward.
        sharded: parameters are spread over ranks and come gathered in `dtype`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        dtype: Literal["float32", "bfloat16"] = "float32",
        logits_chunk: int = 0,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.temperature, self.logits_chunk = model, temperature, logits_chunk
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.sharded = sharded

    @property
    def packed(self) -> bool:
        """Whether microbatches are rows of packed sequences."""
        return self.model.config._attn_implementation == PACKED

    def predict(self, microbatch: Microbatch, *, with_entropy: bool = False) -> Prediction:
        """One forward pass."""
        return Prediction(*self(microbatch, with_entropy))

    def forward(self, microbatch: Microbatch, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities, and entropies or None; logits, [M, V], exist at the predicting positions alone."""
        device = microbatch.input_ids.device
        inputs: dict[str, Any] = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
        inputs |= {"use_cache": False}
        if microbatch.spans is None:
            inputs |= {"attention_mask": microbatch.attention_mask}
        else:
            inputs |= {"spans": microbatch.spans}
        with torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16 and not self.sharded
        ):
            if self.logits_chunk:
                hidden = self.model.base_model(**inputs).last_hidden_state
                output = self.model.get_output_embeddings()
                return chunked_log_probs(
                    hidden.flatten(0, 1).index_select(0, microbatch.predict),
                    output.weight,
                    output.bias,
                    microbatch.targets,
                    temperature=self.temperature,
                    chunk=self.logits_chunk,
                    dtype=self.dtype,
                    with_entropy=with_entropy,
                )
            if microbatch.spans is None:
                logits = self.model(**inputs).logits.flatten(0, 1)[microbatch.predict]
            else:
                logits = self.model(**inputs, logits_to_keep=microbatch.predict).logits[0]
        logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        log_probs = -cross_entropy(logits, microbatch.targets, reduction="none")
        entropy = None
        if with_entropy:
            all_log_probs = torch.log_softmax(logits, dim=-1)
            entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return log_probs, entropy


def recompute_log_probs(
    scorer: Scorer,
    sequences: FlatTokens,
    *,
    trained: np.ndarray,
    tokens_per_microbatch: int = 4096,
    dealer: Dealer | None = None,
) -> np.ndarray:
    """[T] float32 log-probabilities of the `trained` tokens ([T] bool); zero elsewhere, and on other ranks' sequences."""
    log_probs = np.zeros(len(sequences.token_ids), dtype=np.float32)
    indices = sequences_with(sequences, trained)
    microbatches = build_microbatches(
        sequences, indices, trained, budget=tokens_per_microbatch, packed=scorer.packed, dealer=dealer
    )
    with (
        torch.no_grad() if scorer.sharded else torch.inference_mode()
    ):  # FSDP keeps parameters it gathered in inference
        for microbatch in microbatches:
            prediction = scorer.predict(microbatch.to(scorer.model.device))
            log_probs[microbatch.source] = prediction.log_probs.cpu().numpy()
    return log_probs


def sequences_with(sequences: FlatTokens, trained: np.ndarray) -> list[int]:
    """Indices of the sequences that have a trained token."""
    return np.flatnonzero(np.add.reduceat(trained.astype(np.int64), sequences.offsets[:-1])).tolist()


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the input embedding: token ids stay below it."""
    return len(model.get_input_embeddings().weight)  # type: ignore[arg-type]


@contextmanager
def cpu_threads(threads: int) -> Iterator[None]:
    """Run with this many of torch's CPU threads, and put back what was set before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
