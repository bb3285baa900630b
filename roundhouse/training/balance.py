"""Work for every rank: bins of sequences dealt so that all ranks are busy for equally long.

Invariant: every sequence is dealt to exactly one rank, and all ranks get equally many turns. A turn without a bin is
`None`: the rank takes part in the collectives of the turn and contributes nothing.

What a sequence of n tokens costs is n + n²/knee, in tokens: matrices cost the same for each token, causal attention grows
with the square. With P weights that multiply every token, L layers and attention of width h (heads · head size), forward is
2·P·n + 2·L·h·n² multiplications and additions, so

    knee = P / (L · h)         about 35,000 tokens for a dense model of 1.5 B parameters

is the length at which both halves are equal. Backward doubles both and leaves the ratio.

Ranks of a sharded model meet in every layer of every turn, so a turn lasts as long as its costliest bin. Bins are therefore
sorted by cost and dealt in rounds of neighbours, in each round the costliest to the rank that has done least:

    costs 9 8 5 4 2 1, two ranks        turn 1: 9 | 8        turn 2: 4 | 5        turn 3: 2 | 1        sums 15 | 14

Where the last turn has fewer bins than there are ranks, its sequences are spread over all ranks anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a sequence costs to compute, in units of one token's matrix products."""

    knee: float
    """Length at which attention costs as much as everything else; infinite leaves the linear part alone."""

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """[n] costs of sequences of these lengths."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return lengths + lengths * (lengths / self.knee)


def cost_model(model: Any) -> CostModel:
    """The cost of a causal language model of transformers."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    weights = sum(parameter.numel() for parameter in model.parameters()) - embedding
    return CostModel(weights / (config.num_hidden_layers * width))


@dataclass(frozen=True, slots=True)
class Dealer:
    """Gives one rank of several its bins."""

    rank: int
    ranks: int
    cost: CostModel

    def turns(
        self, bins: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, budget: int
    ) -> list[list[int] | None]:
        """This rank's bins of `deal`."""
        return deal(bins, lengths, budget, self.cost, self.ranks)[self.rank]


def deal(
    bins: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, budget: int, cost: CostModel, ranks: int
) -> list[list[list[int] | None]]:
    """For each rank its bins, turn by turn, `None` where there is none. Deterministic.

    With fewer sequences than ranks, some ranks have an empty turn.

    Args:
        bins: indices into `lengths`.
        lengths: of all sequences.
        budget: tokens that a bin of two or more sequences may hold; 0 never makes new bins of several sequences.
    """
    costs = cost.of(np.asarray(lengths))
    parts = sorted((list(members) for members in bins), key=lambda part: -float(costs[part].sum()))
    short = len(parts) % ranks
    if short:
        loose = sorted((i for part in parts[-short:] for i in part), key=lambda i: (-costs[i], i))
        parts[-short:] = _spread(loose, lengths, budget, costs, ranks) or parts[-short:]
    weight = [float(costs[part].sum()) for part in parts]
    done = np.zeros(ranks)
    dealt: list[list[list[int] | None]] = [[] for _ in range(ranks)]
    for first in range(0, len(parts), ranks):
        turn = sorted(range(first, min(first + ranks, len(parts))), key=lambda i: -weight[i])
        for place, rank in enumerate(np.argsort(done, kind="stable").tolist()):
            dealt[rank].append(parts[turn[place]] if place < len(turn) else None)
            done[rank] += weight[turn[place]] if place < len(turn) else 0.0
    return dealt


def _spread(
    indices: Sequence[int], lengths: Sequence[int] | np.ndarray, budget: int, costs: np.ndarray, ranks: int
) -> list[list[int]] | None:
    """At most `ranks` bins of about equal cost: each sequence, costliest first, to the cheapest bin with room.

    None when one finds no room: as many bins as there are ranks always take them, but not always as evenly as this.
    """
    room, weight = np.full(ranks, budget, dtype=np.int64), np.zeros(ranks)
    spread: list[list[int]] = [[] for _ in range(ranks)]
    for index in indices:
        fitting = np.where((room >= lengths[index]) | (weight == 0), weight, np.inf)
        cheapest = int(fitting.argmin())
        if not np.isfinite(fitting[cheapest]):
            return None
        spread[cheapest].append(index)
        room[cheapest] -= lengths[index]
        weight[cheapest] += costs[index]
    return [part for part in spread if part]


def imbalance(dealt: Sequence[Sequence[Sequence[int] | None]], costs: Sequence[float] | np.ndarray) -> float:
    """How much longer the busiest rank works than the mean of all: max / mean − 1, 0 when nobody works."""
    work = _work(dealt, costs).sum(axis=1)
    return float(work.max() / work.mean()) - 1 if work.any() else 0.0


def waiting(dealt: Sequence[Sequence[Sequence[int] | None]], costs: Sequence[float] | np.ndarray) -> float:
    """Share of the ranks' time spent waiting when every turn lasts as long as its costliest bin: 1 − mean / max, summed."""
    work = _work(dealt, costs)
    return 1 - float(work.mean(axis=0).sum() / work.max(axis=0).sum()) if work.any() else 0.0


def _work(dealt: Sequence[Sequence[Sequence[int] | None]], costs: Sequence[float] | np.ndarray) -> np.ndarray:
    """[ranks, turns] cost of each bin."""
    values = np.asarray(costs, dtype=np.float64)
    return np.array([[float(values[list(part)].sum()) if part else 0.0 for part in turns] for turns in dealt])
