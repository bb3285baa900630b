"""Block-diagonal causal attention over a packed row, without a mask.

Invariant: the output at a position is causal attention over the tokens of its own sequence up to it, exactly as if the
sequence stood alone. Each span of the row (sequences of similar length, `packing.Span`) is laid out as a rectangle, padded
at the right, and goes through one causal scaled-dot-product call: keys of padding lie after every real query, so no real
query sees them, and what padding queries compute is dropped. Cost is linear in the row and quadratic only in a sequence.

Registered with transformers under `PACKED`; a forward pass hands over the row's spans as the argument `spans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from roundhouse.fast_imports import lean_transformers

with lean_transformers():
    from transformers import AttentionInterface, PreTrainedModel

from roundhouse.errors import ConfigError
from roundhouse.training.packing import Span

PACKED = "roundhouse_packed"
"""Name of this attention in transformers (`attn_implementation`)."""


class _Pad(torch.autograd.Function):
    """[n, …] → [cells, …]. Padding cells get no gradient by construction, so the gradient is read back, not summed."""

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
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
    if spans is None:
        raise ConfigError(
            "This model was loaded for packed training and is called without spans. Use forward.log_probs."
        )
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unsupported or (sliding_window is not None and sliding_window < max(span.length for span in spans)):
        what = ", ".join(unsupported) or f"a sliding window of {sliding_window} tokens"
        raise ConfigError(
            f"The model's attention uses {what}, which packing does not know. Set train.packing to false."
        )
    sizes = [span.stop - span.start for span in spans]
    # one split, whose backward is one concatenation; a slice each would fill the row with zeros once a span
    pieces = zip(*(tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value)), strict=True)
    parts = [_attend(span, q, k, v, scaling) for span, (q, k, v) in zip(spans, pieces, strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _attend(
    span: Span, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Causal attention of one span: [stop - start, heads, D] each → [stop - start, H, D]."""
    q, k, v = (_rectangle(span, tensor) for tensor in (query, key, value))
    out = scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    flat = out.transpose(1, 2).reshape(span.count * span.length, *query.shape[1:])
    return flat if span.scatter is None else _Unpad.apply(flat, span.scatter)


def _rectangle(span: Span, flat: torch.Tensor) -> torch.Tensor:
    """[stop - start, heads, D] → [count, heads, length, D]."""
    if span.gather is not None:
        flat = _Pad.apply(flat, span.gather, span.scatter)
    return flat.reshape(span.count, span.length, *flat.shape[1:]).transpose(1, 2)


def check_packable(model: PreTrainedModel) -> None:
    """Refuse a model in which a packed sequence could see its neighbour.

    Raises:
        ConfigError: the model has layers other than full attention, or does not take another attention function.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other or not model._supports_attention_backend:
        what = f"layers of kind {', '.join(other)}" if other else "its own attention code"
        raise ConfigError(
            f"{type(model).__name__} has {what}, where packed sequences would mix. Set train.packing to false."
        )


def register() -> None:
    """Make the attention known to transformers; repeating it changes nothing."""
    AttentionInterface.register(PACKED, packed_attention)
