"""Attention over a row of packed sequences, and the models that it fits.

Invariant: values and gradients equal those of each sequence alone, up to rounding. A model with layers in which
neighbours would mix is refused before a run (`check_packable`, `try_packed_pass`).

`packed_attention`, registered as `PACKED`, is block-diagonal causal attention over a packed row,
without a mask:
a position attends to the earlier tokens of its own sequence. Each span of the row (`packing.Span`) becomes a
right-padded rectangle in
one causal scaled-dot-product call. No real query sees padding, and outputs of padding are dropped. Cost is linear in
the row and
quadratic only in a sequence. A shared prompt's keys and values precede each sequence's, with a mask that is causal
after them. A sliding window shorter than a sequence takes such a mask, too. Capped scores (Gemma 2) and attention sinks
(GPT-OSS) are computed by whole matrices of scores, which torch's fused attention does not know.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from roundhouse.errors import ConfigError
from roundhouse.imports import lean_transformers
from roundhouse.pretrained import build_model
from roundhouse.training.context_parallel import Context
from roundhouse.training.packing import Span

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

with lean_transformers():
    from transformers import AttentionInterface

PACKED = "roundhouse_packed"
"""Name of the packed attention in transformers (`attn_implementation`)."""


class _Pad(torch.autograd.Function):
    """[n, …] → [cells, …]. Padding cells do not get a gradient, so the backward pass gathers instead of summing."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        return flat.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (scatter,) = ctx.saved_tensors
        return gradient.index_select(0, scatter), None, None


class _Unpad(torch.autograd.Function):
    """[cells, …] → [n, …], the inverse of `_Pad` on real cells."""

    @staticmethod
    def forward(ctx: Any, cells: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        ctx.cells = cells.shape[0]
        return cells.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scatter,) = ctx.saved_tensors
        whole = gradient.new_zeros((ctx.cells, *gradient.shape[1:]))
        return whole.index_copy_(0, scatter, gradient), None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    spans: Sequence[Span] | None = None,
    context: Context | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for the interface of transformers: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D].

    Args:
        context: with one, T are this rank's positions of the row that the spans cover.
    """
    if spans is None:
        raise _WithoutSpans(
            "This model was loaded for packed training and is called without spans. Use forward.log_probs."
        )
    if options.get("position_bias") is not None:
        raise ConfigError(
            "The model's attention uses position_bias, which packing does not know. Set train.packing to false."
        )
    sinks: torch.Tensor | None = options.get("s_aux")
    if context is not None:
        query, key, value = context.heads(query, key, value)
        sinks = None if sinks is None else sinks.chunk(context.size)[context.rank]
    scores = _Scores(scaling, sliding_window, options.get("softcap"), sinks)
    sizes = [span.stop - span.start for span in spans]
    # one split: its backward is one concatenation; with slices, each span would fill the row with zeros
    queries, keys, values = (tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value))
    parts = []
    for span, q, k, v in zip(spans, queries, keys, values, strict=True):
        parts.append(_attend(span, q, k, v, _before(span, spans, keys, values), scores))
    whole = (parts[0] if len(parts) == 1 else torch.cat(parts))[None]
    return (whole if context is None else context.positions(whole)), None


class _WithoutSpans(ConfigError):
    """Attention was called without the places of sequences in a row."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """A model's changes of attention scores before the softmax."""

    scaling: float | None
    window: int | None
    """Positions that a query sees, itself included; None: all before it."""
    softcap: float | None
    """A score s becomes c · tanh(s / c)."""
    sinks: torch.Tensor | None
    """[H] score of a key without value, which takes a share of the softmax."""

    @property
    def fused(self) -> bool:
        """Return whether torch's fused attention computes this."""
        return self.softcap is None and self.sinks is None

    def visible(self, span: Span, device: torch.device) -> torch.Tensor | None:
        """[length, reach] bool: the keys that each query of a span sees; None if they are all before it."""
        visible, earlier = span.visible, span.reach - span.length
        if self.fused and (self.window is None or self.window >= span.reach):
            return visible
        if visible is None:
            visible = torch.ones(span.length, span.reach, dtype=torch.bool, device=device).tril(earlier)
        return visible if self.window is None else visible.triu(earlier - self.window + 1)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Attention by whole matrices of scores, in float32: [count, heads, length, D] → the same."""
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~visible, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        shares = scores.softmax(-1).to(v.dtype)
        return shares[..., : k.shape[2]] @ v


def _before(
    span: Span, spans: Sequence[Span], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return key and value of everything before each sequence of a span, first to last; None at the start."""
    numbers: list[int] = []
    while span.prompt is not None:
        numbers.insert(0, span.prompt)
        span = spans[span.prompt]
    if len(numbers) < 2:
        return (keys[numbers[0]], values[numbers[0]]) if numbers else None
    return torch.cat([keys[number] for number in numbers]), torch.cat([values[number] for number in numbers])


def _attend(
    span: Span,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompt: tuple[torch.Tensor, torch.Tensor] | None,
    scores: _Scores,
) -> torch.Tensor:
    """Compute causal attention of one span: [stop - start, heads, D] each → [stop - start, H, D].

    Args:
        prompt: key and value of the prompt before each sequence of the span, [its length, K, D].
    """
    q, k, v = (_rectangle(span, tensor) for tensor in (query, key, value))
    if prompt is not None:
        k, v = (
            torch.cat((before.transpose(0, 1).expand(span.count, -1, -1, -1), own), dim=2)
            for before, own in zip(prompt, (k, v), strict=True)
        )
    visible = scores.visible(span, q.device)
    if scores.fused:
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            is_causal=visible is None,
            scale=scores.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        assert visible is not None, "made for every span"
        out = scores.attention(q, k, v, visible)
    flat = out.transpose(1, 2).reshape(span.count * span.length, query.shape[1], -1)  # values may be narrower
    return flat if span.scatter is None else _Unpad.apply(flat, span.scatter)


def _rectangle(span: Span, flat: torch.Tensor) -> torch.Tensor:
    """[stop - start, heads, D] → [count, heads, length, D]."""
    if span.gather is not None:
        flat = _Pad.apply(flat, span.gather, span.scatter)
    return flat.reshape(span.count, span.length, *flat.shape[1:]).transpose(1, 2)


def check_packable(model: PreTrainedModel) -> None:
    """Refuse a model in which a packed sequence could see its neighbour.

    Raises:
        ConfigError: the model has layers other than attention, or does not accept another attention function.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other or not model._supports_attention_backend:
        what = f"layers of kind {', '.join(other)}" if other else "its own attention code"
        raise ConfigError(
            f"{type(model).__name__} has {what}, where packed sequences would mix. Set train.packing to false."
        )


def register_packed_attention() -> None:
    """Register the attention with transformers; repeating it changes nothing."""
    AttentionInterface.register(PACKED, packed_attention)


def try_packed_pass(model: PreTrainedModel) -> None:
    """Refuse a model without numbers in which a layer does not call the packed attention, by a pass over shapes alone.

    A model is not refused if its pass needs numbers.

    Raises:
        ConfigError: names the number of layers that do, or the option that packing does not know.
    """
    row, calls = torch.zeros(1, 4, dtype=torch.long, device="meta"), _Calls()
    options: dict[str, Any] = {"spans": (Span(0, 4, 1, 4, None, None),), "context": calls, "use_cache": False}
    try:
        model(input_ids=row, position_ids=row, **options)
    except _WithoutSpans:
        raise ConfigError(
            f"{type(model).__name__} does not pass the places of packed sequences to its attention. Set train.packing to false."
        ) from None
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return
    layers = model.config.get_text_config().num_hidden_layers
    if calls.count != layers:
        raise ConfigError(
            f"{type(model).__name__} calls the packed attention {calls.count} times in {layers} layers: in the others packed "
            "sequences would mix. Set train.packing to false."
        )


def why_not_packed(config: PreTrainedConfig) -> str | None:
    """Return the reason why sequences of a model cannot be packed; None if they can."""
    register_packed_attention()
    with torch.device("meta"):
        model: PreTrainedModel = build_model(copy.deepcopy(config), attn_implementation=PACKED)
    try:
        check_packable(model)
        try_packed_pass(model)
    except ConfigError as error:
        return str(error)
    return None


class _Calls:
    """Stand-in for a `Context` that counts calls of attention."""

    def __init__(self) -> None:
        self.count = 0
        self.size, self.rank = 1, 0

    def heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        self.count += 1
        return list(tensors)

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor
