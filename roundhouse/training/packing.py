"""From ragged sequences to forward passes: rows of packed sequences, or padded rectangles; and their distribution over
ranks.

Invariant: each trained token is predicted exactly once, from exactly the tokens before it in its own sequence, at
positions that start at 0. Sequences in a row do not see each other. Tokens from the last trained one on predict nothing
and are omitted.

    row        a0 a1 a2 a3 b0 b1 b2        (longest first)
    positions   0  1  2  3  0  1  2

**Shared prompts.** Sequences with equal untrained prefixes, such as a group's rollouts, share one copy (Prefix Grouper,
arXiv:2506.05433); a prefix of all prompts is in each row once. A family is shared if it saves a tenth of its tokens, a
common prefix if it saves a tenth of all (`SHARING_PAYS`). Values and gradients equal those of whole sequences up to the
order of sums.

    row        p0 p1 p2 a3 a4 a5 b3 b4     for p0 p1 p2 a3 a4 a5 and p0 p1 p2 b3 b4
    positions   0  1  2  3  4  5  3  4

**Ranks** (`Dealer`). Every sequence goes to exactly one rank, and all ranks get equally many turns, perhaps idle
(`None`). A sequence of n tokens costs n + n²/knee: with P weights that multiply every token, L layers and attention of
width h, forward is 2·P·n + 2·L·h·n² operations, so knee = P / (L · h), about 35,000 tokens for a dense model of 1.5 B
parameters. A turn lasts as long as its costliest bin, so bins are sorted by cost and dealt in rounds, the costliest to
the rank with the least work so far. The last round is spread over all ranks.

    costs 9 8 5 4 2 1, two ranks        turn 1: 9 | 8        turn 2: 4 | 5        turn 3: 2 | 1        sums 15 | 14
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from roundhouse.errors import ConfigError
from roundhouse.training.language_model import frozen_towers


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of a sequence's computation, in units of one token's matrix products."""

    knee: float
    """Length at which attention costs as much as everything else; infinite leaves the linear part alone."""

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """[n] costs of sequences of these lengths."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return lengths + lengths * (lengths / self.knee)


def cost_model(model: Any) -> CostModel:
    """The cost of a causal language model of transformers."""
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    frozen = sum(parameter.numel() for parameter in frozen_towers(model).values())
    weights = sum(parameter.numel() for parameter in model.parameters()) - embedding - frozen
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
    """Return each rank's bins, turn by turn, `None` for an idle turn. Deterministic.

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
    work = np.zeros(ranks)
    dealt: list[list[list[int] | None]] = [[] for _ in range(ranks)]
    for first in range(0, len(parts), ranks):
        turn = sorted(range(first, min(first + ranks, len(parts))), key=lambda i: -weight[i])
        for place, rank in enumerate(np.argsort(work, kind="stable").tolist()):
            dealt[rank].append(parts[turn[place]] if place < len(turn) else None)
            work[rank] += weight[turn[place]] if place < len(turn) else 0.0
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
    """Return the excess of the busiest rank's work over the mean: max / mean − 1, 0 without work."""
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


SPAN_RATIO = 0.8
"""Sequences of a row with lengths within this ratio share one attention call, padded to the longest of them. On
the quickstart's lengths 0.8 and 0.9 were alike within the noise; 1.0 makes many small calls, and 0 pads without
bound."""


SHARING_PAYS = 0.1
"""The share of their tokens that sequences must save by sharing a prompt, or its beginning: the calls of attention become more
and smaller, and one with a prompt before it takes a mask."""


LARGEST_MASK = 2**26
"""Cells of the largest mask; sequences do not share their prompt if their tokens need a larger one."""


class FlatTokens(Protocol):
    """Ragged sequences, held flat: sequence s owns the slice `offsets[s]:offsets[s + 1]` of the tokens."""

    @property
    def offsets(self) -> np.ndarray:
        """[S + 1] int64."""
        ...

    @property
    def token_ids(self) -> np.ndarray:
        """[T] int32."""
        ...

    @property
    def images(self) -> Sequence[Sequence[bytes]] | None:
        """[S] image files of the sequences; empty or None without any."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive sequences of a packed row, of similar length, that attention handles as one rectangle."""

    start: int
    stop: int
    """Positions of the row: [start, stop)."""
    count: int
    length: int
    """Sequences, and the length of the longest."""
    gather: torch.Tensor | None
    """[count · length] position within the span of each cell; None when all are equally long. Padding cells repeat 0."""
    scatter: torch.Tensor | None
    """[stop - start] cell of each position: the inverse on real positions."""
    prompt: int | None = None
    """The span, of one sequence, that precedes each of these; none by default. It may have one before it in turn."""
    visible: torch.Tensor | None = None
    """[length, all prompts' lengths + length] bool, with a prompt: the keys that each query sees."""

    @property
    def reach(self) -> int:
        """The most keys that one query sees."""
        return self.length if self.visible is None else self.visible.shape[1]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass: B rows of L positions (B is 1 when packed), predicting M trained tokens."""

    input_ids: torch.Tensor
    """[B, L]."""
    position_ids: torch.Tensor
    """[B, L]."""
    attention_mask: torch.Tensor | None
    """[B, L], 0 on padding; None when packed."""
    spans: tuple[Span, ...] | None
    """They cover the packed row; None when padded."""
    predict: torch.Tensor
    """[M] flat positions of the logits that predict the trained tokens."""
    targets: torch.Tensor
    """[M] ids of the trained tokens."""
    source: np.ndarray
    """[M] positions of the trained tokens in the token arrays of the sequences."""
    real_tokens: int
    """Positions that are not padding; 0 when the microbatch is idle and predicts nothing."""
    images: tuple[bytes, ...] = ()
    """Image files of the rows, in order."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        spans = self.spans and tuple(
            replace(span, gather=move(span.gather), scatter=move(span.scatter), visible=move(span.visible))
            for span in self.spans
        )
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            attention_mask=move(self.attention_mask),
            spans=spans,
            predict=self.predict.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return bins of indices whose lengths sum to at most `budget`, by first-fit decreasing; ties in order of index.

    Deterministic. A length above the budget gets a separate bin. Inside a bin the longest is first.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins: list[list[int]] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for index in order:
        fitting = room[: len(bins)] >= lengths[index]
        first = int(fitting.argmax()) if len(bins) else 0
        if len(bins) and fitting[first]:
            bins[first].append(index)
        else:
            first = len(bins)
            bins.append([index])
            room[first] = budget
        room[first] -= lengths[index]
    return bins


def build_microbatches(
    sequences: FlatTokens,
    indices: Sequence[int],
    trained: np.ndarray,
    *,
    budget: int,
    packed: bool,
    dealer: Dealer | None = None,
) -> list[Microbatch]:
    """Return microbatches that together predict the `trained` tokens ([T] bool) of the sequences with these `indices`.

    Args:
        budget: positions of one microbatch, padding included; a longer sequence gets a separate microbatch.
        packed: rows with block-diagonal attention, else rectangles of sequences of similar length.
        dealer: selects one rank's; all ranks get equally many, some of them perhaps idle.

    Raises:
        ConfigError: packed rows of sequences with images.
    """
    if packed and sequences.images:
        raise ConfigError("Sequences with images cannot share a row. Set train.packing to false.")
    bounds = [slice(sequences.offsets[index], sequences.offsets[index + 1]) for index in indices]
    needed = np.array([np.flatnonzero(trained[tokens])[-1] for tokens in bounds], dtype=np.int64)
    if not packed:
        bins: list[list[int]] = []
        for index in np.argsort(-needed, kind="stable").tolist():
            if bins and (len(bins[-1]) + 1) * needed[bins[-1][0]] <= budget:
                bins[-1].append(index)
            else:
                bins.append([index])
        # sequences of a rectangle spread anew would be padded beyond the budget
        turns = bins if dealer is None else dealer.turns(bins, needed, 0)
        return [
            _padded(sequences, [indices[i] for i in members], needed[members], trained) if members else _idle(packed)
            for members in turns
        ]
    families = _families(sequences, indices, needed, trained, budget)
    common = _common_beginning(sequences, indices, families, needed, trained, budget)
    lengths, room = [family.tokens - common for family in families], budget - common
    turns = pack(lengths, room) if dealer is None else dealer.turns(pack(lengths, room), lengths, room)
    return [
        _packed(sequences, indices, [families[i] for i in members], needed, trained, common if len(members) > 1 else 0)
        if members
        else _idle(packed)
        for members in turns
    ]


def _idle(packed: bool) -> Microbatch:
    """Return one position that predicts nothing, for a rank that only takes part in its peers' collectives."""
    nothing = np.zeros(0, dtype=np.int64)
    return Microbatch(
        input_ids=torch.zeros(1, 1, dtype=torch.long),
        position_ids=torch.zeros(1, 1, dtype=torch.long),
        attention_mask=None if packed else torch.ones(1, 1, dtype=torch.long),
        spans=(Span(0, 1, 1, 1, None, None),) if packed else None,
        predict=_long(nothing),
        targets=_long(nothing),
        source=nothing,
        real_tokens=0,
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """Sequences that stay together."""

    members: list[int]
    """Places in `needed`, longest first."""
    prompt: int
    """Tokens that they share; 0 when there is one sequence."""
    tokens: int
    """Tokens of all its sequences in a row."""


def _families(
    sequences: FlatTokens, indices: Sequence[int], needed: np.ndarray, trained: np.ndarray, budget: int
) -> list[_Family]:
    """Return the sequences in families of at most `budget` tokens that share prefixes, if sharing saves enough."""
    by_prompt: dict[bytes, list[int]] = {}
    prompts = np.zeros(len(indices), dtype=np.int64)
    for place in np.argsort(-needed, kind="stable").tolist():
        start = sequences.offsets[indices[place]]
        prompts[place] = _prompt_length(sequences, indices[place], trained)
        by_prompt.setdefault(sequences.token_ids[start : start + prompts[place]].tobytes(), []).append(place)
    families = []
    for members in by_prompt.values():
        prompt = int(prompts[members[0]])
        own = needed[members] - prompt
        row = np.cumsum(own)
        while members:
            count = max(1, int(np.searchsorted(row - row[0] + own[0], budget - prompt, side="right")))
            whole, saved = int(needed[members[:count]].sum()), prompt * (count - 1)
            cells = own[0] * (prompt + own[0])
            if count > 1 and saved >= SHARING_PAYS * whole and cells <= LARGEST_MASK:
                families.append(_Family(members[:count], prompt, whole - saved))
            else:
                count = 1
                families.append(_Family(members[:1], 0, int(needed[members[0]])))
            members, own, row = members[count:], own[count:], row[count:]
    return families


def _prompt_length(sequences: FlatTokens, index: int, trained: np.ndarray) -> int:
    """Tokens before the first trained one."""
    return int(trained[sequences.offsets[index] : sequences.offsets[index + 1]].argmax())


def _common_beginning(
    sequences: FlatTokens,
    indices: Sequence[int],
    families: Sequence[_Family],
    needed: np.ndarray,
    trained: np.ndarray,
    budget: int,
) -> int:
    """Return the length of the prefix of all prompts if sharing it saves enough; else 0."""
    if len(families) < 2:
        return 0
    prompts = []
    for family in families:
        index = indices[family.members[0]]
        start = sequences.offsets[index]
        prompts.append(sequences.token_ids[start : start + _prompt_length(sequences, index, trained)])
    shortest = min(map(len, prompts))
    same = (np.stack([prompt[:shortest] for prompt in prompts]) == prompts[0][:shortest]).all(0)
    common = shortest if same.all() else int(same.argmin())
    saved, longest = common * (len(families) - 1), int(needed.max())
    pays = saved >= SHARING_PAYS * sum(family.tokens for family in families)
    return common if pays and common < budget and (longest - common) * longest <= LARGEST_MASK else 0


def _packed(
    sequences: FlatTokens,
    indices: Sequence[int],
    families: list[_Family],
    needed: np.ndarray,
    trained: np.ndarray,
    common: int,
) -> Microbatch:
    """One row: the `common` tokens that all begin with, families with a prompt, then single sequences, longest first."""
    runs: list[tuple[int, int, int]] = []  # of the row: a sequence's place in `needed`, and which of its positions
    places: list[int] = []
    origins: list[int] = []  # of each sequence: a token's place in the row less its position
    before: list[int] = []  # predictor of each sequence's first token, -1 for the one at its place
    spans: list[Span] = []
    end = common
    if common:
        runs.append((families[0].members[0], 0, common))
        spans.append(Span(0, common, 1, common, None, None))
    beginning = (0, common) if common else None
    alone = _Family([family.members[0] for family in families if not family.prompt], 0, 0)
    for family in [*(family for family in families if family.prompt), alone]:
        size, prompt, last = family.prompt or common, beginning, common - 1
        if size > common:
            runs.append((family.members[0], common, size))
            prompt = (len(spans), size)
            spans += _spans(np.array([size - common]), end, beginning)
            end += size - common
            last = end - 1
        own = needed[family.members] - size
        spans += _spans(own[own > 0], end, prompt)
        for place, length in zip(family.members, own.tolist(), strict=True):
            runs.append((place, size, size + length))
            places.append(place)
            origins.append(end - size)
            before.append(last if size == _prompt_length(sequences, indices[place], trained) else -1)
            end += length
    tokens = np.concatenate([sequences.offsets[indices[place]] + np.arange(start, stop) for place, start, stop in runs])
    source, predict = _predictions(sequences, [indices[place] for place in places], origins, trained, before)
    return Microbatch(
        input_ids=_long(sequences.token_ids[tokens])[None],
        position_ids=_long(np.concatenate([np.arange(start, stop) for _, start, stop in runs]))[None],
        attention_mask=None,
        spans=tuple(spans),
        predict=_long(predict),
        targets=_long(sequences.token_ids[source]),
        source=source,
        real_tokens=len(tokens),
    )


def _padded(sequences: FlatTokens, members: list[int], needed: np.ndarray, trained: np.ndarray) -> Microbatch:
    width = int(needed.max())
    real = np.arange(width) < needed[:, None]
    tokens = np.where(real, sequences.offsets[members][:, None] + np.arange(width), 0)
    source, predict = _predictions(sequences, members, np.arange(len(members)) * width, trained)
    return Microbatch(
        input_ids=_long(np.where(real, sequences.token_ids[tokens], 0)),
        position_ids=_long(np.broadcast_to(np.arange(width), real.shape)),
        attention_mask=_long(real),
        spans=None,
        predict=_long(predict),
        targets=_long(sequences.token_ids[source]),
        source=source,
        real_tokens=int(needed.sum()),
        images=tuple(image for member in members for image in (sequences.images or {member: ()})[member]),
    )


def _predictions(
    sequences: FlatTokens,
    members: Sequence[int],
    origins: Sequence[int] | np.ndarray,
    trained: np.ndarray,
    before: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """[M] trained tokens as indices into the token arrays, and [M] the flat position before each.

    Args:
        origins: of each member, the flat position of a token less its position in the sequence.
        before: the position before each member's first trained token, if it is not at its place; -1 if it is.
    """
    source, predict = [], []
    for number, (member, origin) in enumerate(zip(members, origins, strict=True)):
        start, stop = sequences.offsets[member], sequences.offsets[member + 1]
        local = np.flatnonzero(trained[start:stop])
        at = origin + local - 1
        if before is not None and before[number] >= 0:
            at[0] = before[number]
        source.append(start + local)
        predict.append(at)
    return np.concatenate(source), np.concatenate(predict)


def _spans(lengths: np.ndarray, start: int, prompt: tuple[int, int] | None = None) -> list[Span]:
    """Cut sequences, longest first, at lengths below `SPAN_RATIO` of the span's longest.

    Args:
        start: the position of the first in the row.
        prompt: number and length of the span before each of them.
    """
    spans: list[Span] = []
    first = 0
    while first < len(lengths):
        longest = int(lengths[first])
        last = first
        while last < len(lengths) and lengths[last] >= SPAN_RATIO * longest:
            last += 1
        inside = lengths[first:last]
        stop = start + int(inside.sum())
        gather, scatter, visible = None, None, None
        if (inside != longest).any():
            real = np.arange(longest) < inside[:, None]
            cells = np.zeros(real.shape, dtype=np.int64)
            cells[real] = np.arange(int(inside.sum()))
            gather, scatter = _long(cells.ravel()), _long(np.flatnonzero(real.ravel()))
        if prompt is not None:
            visible = torch.ones(longest, prompt[1] + longest, dtype=torch.bool).tril(prompt[1])
        spans.append(Span(start, stop, last - first, longest, gather, scatter, prompt and prompt[0], visible))
        first, start = last, stop
    return spans


def _long(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
