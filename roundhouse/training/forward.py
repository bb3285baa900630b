"""Log-probabilities of the trained tokens, from a model and a microbatch.

Invariant: logits exist only at the positions that predict a trained token, in float32, divided by the sampling temperature
before the softmax: the distribution that the engine sampled from. No dropout is ever active.

`chunked_log_probs` computes them in chunks of positions, so that logits of a whole batch never exist. Values and gradients are
those of `log_softmax(hidden @ weightᵀ / temperature)` at the targets, in float32; at any moment there are at most `chunk` rows
of logits. Forward keeps none of them, backward computes each chunk again:

    z = h · Wᵀ / τ        log p_t = z_t − logsumexp(z)        H = −Σ p log p
    ∂/∂z (a · log p_t + b · H) = a · (1_t − p) − b · p · (log p + H)

One row of logits for a vocabulary of 150,000 takes 0.6 MB: 32,768 positions would take 20 GB, and their gradient as much again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from roundhouse.errors import ConfigError, DataError
from roundhouse.images import FAMILIES, ImageReader
from roundhouse.training.context_parallel import Context
from roundhouse.training.language_model import hidden_states
from roundhouse.training.packed_attention import PACKED
from roundhouse.training.packing import Dealer, FlatTokens, Microbatch, Span, build_microbatches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Prediction:
    """A forward pass's values for its trained tokens."""

    log_probs: torch.Tensor
    """[M] float32; of a critic its values."""
    entropy: torch.Tensor | None
    """[M] float32, when asked for."""


class Scorer(torch.nn.Module):
    """A causal language model with its loss-side end, from microbatches to log-probabilities.

    One module, so that a model sharded over ranks gathers the output layer for the pass that uses it.

    Args:
        temperature: sampling temperature of the sequences.
        dtype: bfloat16 runs the model in autocast; the softmax stays float32.
        logits_chunk: rows of logits at a time (`chunked_log_probs`); 0 computes all at once and keeps them for
            backward.
        sharded: parameters are spread over ranks and arrive gathered in `dtype`.
        context: the ranks that share each microbatch; None if every rank computes its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        dtype: Literal["float32", "bfloat16"] = "float32",
        logits_chunk: int = 0,
        sharded: bool = False,
        context: Context | None = None,
    ) -> None:
        super().__init__()
        self.model, self.temperature, self.logits_chunk = model, temperature, logits_chunk
        self.context = context
        self.images: ImageReader | None = None
        """Reads the images of sequences; None refuses them."""
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.sharded = sharded

    @property
    def packed(self) -> bool:
        """Return whether microbatches are rows of packed sequences."""
        return self.model.config._attn_implementation == PACKED

    def predict(self, microbatch: Microbatch, *, with_entropy: bool = False) -> Prediction:
        """One forward pass."""
        return Prediction(*self(microbatch, with_entropy))

    def forward(self, microbatch: Microbatch, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities, and entropies or None; logits, [M, V], exist at the predicting positions alone."""
        if self.context is None:
            return self._score(microbatch, with_entropy)
        part, mine = self.context.part(microbatch)
        log_probs, entropy = self._score(part, with_entropy)
        count = len(microbatch.predict)
        together = self.context.together(log_probs, mine, count)
        return together, None if entropy is None else self.context.together(entropy, mine, count)

    def _score(self, microbatch: Microbatch, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = self._inputs(microbatch)
        with self._autocast(microbatch):
            if self.logits_chunk:
                output = self.model.get_output_embeddings()
                return chunked_log_probs(
                    self._hidden(microbatch),
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

    def _hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """[M, D] states at the predicting positions, after the last norm."""
        whole = self.model.base_model if microbatch.images else hidden_states(self.model)
        hidden: torch.Tensor = whole(**self._inputs(microbatch)).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, microbatch.predict)

    def _inputs(self, microbatch: Microbatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
        inputs |= {"use_cache": False}
        if microbatch.spans is None:
            return inputs | {"attention_mask": microbatch.attention_mask} | self._pixels(microbatch)
        return inputs | {"spans": microbatch.spans, "context": self.context}

    def _pixels(self, microbatch: Microbatch) -> dict[str, Any]:
        """Return what the whole model needs for images beside tokens; it computes their positions itself."""
        if not microbatch.images:
            return {}
        if self.images is None:
            raise DataError(
                "The sequences have images, and the policy is trained on text. Set generation.images to true, with a model "
                f"of type {' or '.join(FAMILIES)}."
            )
        ids = microbatch.input_ids
        pixels = {name: values.to(ids.device) for name, values in self.images.pixels(microbatch.images).items()}
        return {"position_ids": None, "mm_token_type_ids": (ids == self.images.token_id).int(), **pixels}

    def _autocast(self, microbatch: Microbatch) -> torch.autocast:
        low = self.dtype == torch.bfloat16 and not self.sharded
        return torch.autocast(microbatch.input_ids.device.type, dtype=torch.bfloat16, enabled=low)


class Critic(Scorer):
    """A model with a value head as its output layer (`layers.put_value_head`): its output for a token is the value
    before it.

    The head is computed in float32 for every dtype. Its values take the place of log-probabilities in `Prediction`.
    """

    def _score(self, microbatch: Microbatch, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._autocast(microbatch):
            hidden = self._hidden(microbatch)
        head = self.model.get_output_embeddings()
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float()).squeeze(-1), None


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
    """Run with this many of torch's CPU threads, and restore the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _ChunkedLogProbs(torch.autograd.Function):
    """(hidden [M, D], weight [V, D], bias [V] or None, targets [M]) → log-probabilities [M], entropies [M]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = hidden.new_empty(len(hidden), dtype=_exact(hidden))
        entropy = torch.zeros_like(log_probs)
        for part in _chunks(len(hidden), chunk):
            every = _log_softmax(hidden[part], weight, bias, temperature)
            log_probs[part] = every.gather(1, targets[part, None]).squeeze(1)
            if with_entropy:
                entropy[part] = -(every.exp() * every).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.chunk, ctx.with_entropy = temperature, chunk, with_entropy
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        by_log_prob, by_entropy = gradients  # zeros for unused outputs
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        for_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=_exact(weight)) if needs_grad[1] else None
        for_bias = torch.zeros_like(bias, dtype=_exact(bias)) if needs_grad[2] else None
        for part in _chunks(len(hidden), ctx.chunk):
            every = _log_softmax(hidden[part], weight, bias, ctx.temperature)
            by_both = by_log_prob[part, None], by_entropy[part, None] if ctx.with_entropy else None
            slope = _slope(every, targets[part, None], entropy[part, None], *by_both) / ctx.temperature
            if for_bias is not None:
                for_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[part] = slope @ weight
            if for_weight is not None:
                for_weight += slope.t() @ hidden[part]
        return (
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            *(None,) * 4,
        )


def chunked_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk: int,
    dtype: torch.dtype,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and, when asked for, entropy of its distribution: [M] float32 with a gradient.

    Args:
        hidden: [M, D] states at the predicting positions, after the last norm.
        weight, bias: of the output layer, [V, D] and [V].
        targets: [M] token ids.
        chunk: rows of logits at a time.
        dtype: of the matrix products; softmax and sums are float32.
    """
    layer = weight.to(dtype), None if bias is None else bias.to(dtype)
    log_probs, entropy = _ChunkedLogProbs.apply(hidden.to(dtype), *layer, targets, temperature, chunk, with_entropy)
    return log_probs, entropy if with_entropy else None


def check_plain_logits(scorer: Scorer) -> None:
    """Refuse a model if its logits are not just its output layer applied to its last hidden state; all ranks take part.

    Raises:
        ConfigError: it scales or caps them, as Gemma 2 and Granite do.
    """
    model, count = scorer.model, min(vocabulary_size(scorer.model), 64)
    positions = torch.tensor([[0, 1]])
    row = Microbatch(
        input_ids=positions,
        position_ids=positions,
        attention_mask=None if scorer.packed else torch.ones_like(positions),
        spans=(Span(0, 2, 1, 2, None, None),) if scorer.packed else None,
        predict=torch.ones(count, dtype=torch.long),  # the second position, of as many targets
        targets=torch.arange(count),
        source=np.arange(count),
        real_tokens=2,
    ).to(model.device)
    chunk, differences = scorer.logits_chunk, []
    for size in (count, 0):
        scorer.logits_chunk = size
        with torch.no_grad():
            differences.append(scorer.predict(row).log_probs)
    scorer.logits_chunk = chunk
    relative, absolute = (2e-2, 2e-2) if scorer.dtype == torch.bfloat16 else (1e-4, 1e-5)
    if not torch.allclose(differences[0], differences[1], rtol=relative, atol=absolute):
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the output layer, which train.logits_chunk_tokens does not know. "
            "Set it to 0."
        )


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _exact(tensor: torch.Tensor) -> torch.dtype:
    """In which softmax and sums are computed: float32, unless the tensor is in float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """[rows, V]."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_exact(hidden))
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1)


def _slope(
    every: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    by_log_prob: torch.Tensor,
    by_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """[rows, V] gradient by the scaled logits; the arguments after the first are [rows, 1]."""
    probs = every.exp()
    slope = probs * -by_log_prob
    if by_entropy is not None:
        slope -= probs * (every + entropy) * by_entropy
    return slope.scatter_add_(1, targets, by_log_prob)
