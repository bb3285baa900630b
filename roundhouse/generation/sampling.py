"""Drawing tokens from logits, row by row reproducible.

Invariant: a row's token depends on its own logits and its own generator only, never on the batch it is computed in; and the
log-probability returned is that of the distribution it was drawn from (temperature, then top-k, then top-p, as in vLLM).
Greedy rows (temperature 0) take the most likely token and report its log-probability at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from roundhouse.generation.engine import Draw


def draw_row(logits_V: torch.Tensor, draw: Draw, generator: torch.Generator) -> tuple[int, float]:
    """One token and its log-probability from the logits of one position."""
    import torch

    logits_V = logits_V.float()
    if draw.temperature == 0:
        logprobs_V = torch.log_softmax(logits_V, dim=-1)
        token = int(logits_V.argmax())
        return token, float(logprobs_V[token])
    logprobs_V = torch.log_softmax(_filtered(logits_V / draw.temperature, draw), dim=-1)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])


def _filtered(logits_V: torch.Tensor, draw: Draw) -> torch.Tensor:
    import torch

    if draw.top_k is not None and draw.top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(draw.top_k).values[-1], -torch.inf)
    if draw.top_p < 1:
        ordered_V, index_V = logits_V.sort(descending=True)
        probs_V = ordered_V.softmax(-1)
        # Keep tokens until the mass before them reaches top_p, so at least one stays.
        dropped_V = probs_V.cumsum(-1) - probs_V >= draw.top_p
        logits_V = logits_V.masked_fill(dropped_V.scatter(0, index_V, dropped_V), -torch.inf)
    return logits_V


def generators(draws: Sequence[Draw]) -> list[torch.Generator]:
    """One generator a row, from its seed; without a seed from the process's own randomness."""
    import torch

    made = []
    for draw in draws:
        generator = torch.Generator()
        if draw.seed is None:
            generator.seed()
        else:
            generator.manual_seed(draw.seed)
        made.append(generator)
    return made
