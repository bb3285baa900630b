"""From ragged sequences to what a forward pass takes: rows of packed sequences, or a padded rectangle.

Invariant: each trained token is predicted exactly once, from exactly the tokens before it in its own sequence, at positions
that start at 0. A packed row holds whole sequences one after the other; nothing of one is visible to another.

    row        a0 a1 a2 a3 b0 b1 b2        (longest first)
    positions   0  1  2  3  0  1  2

Tokens after the last trained one of a sequence, and that one itself, predict nothing that is trained: they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from roundhouse.training.balance import Dealer

SPAN_RATIO = 0.8
"""Sequences of a row whose lengths lie within this ratio share one attention call, padded to the longest of them. On the
quickstart's lengths 0.8 and 0.9 were alike within the noise; 1.0 makes many small calls, and 0 pads without bound."""


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
    """[M] flat positions whose logits predict the trained tokens."""
    targets: torch.Tensor
    """[M] ids of the trained tokens."""
    source: np.ndarray
    """[M] where the trained tokens stand in the token arrays of the sequences."""
    real_tokens: int
    """Positions that are not padding; 0 when the microbatch is idle and predicts nothing."""

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        spans = self.spans and tuple(
            replace(span, gather=move(span.gather), scatter=move(span.scatter)) for span in self.spans
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
    """Bins of indices whose lengths sum to at most `budget`, by first-fit decreasing; ties in order of index.

    Deterministic. A length above the budget gets a bin of its own. Inside a bin the longest stands first.
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
    """Microbatches that together predict the `trained` tokens ([T] bool) of the sequences with these `indices`.

    Args:
        budget: positions of one microbatch, padding included; a longer sequence gets a microbatch of its own.
        packed: rows with block-diagonal attention, else rectangles of sequences of similar length.
        dealer: narrows them to one rank's; all ranks get equally many, some of them perhaps idle.
    """
    bounds = [slice(sequences.offsets[index], sequences.offsets[index + 1]) for index in indices]
    needed = np.array([np.flatnonzero(trained[tokens])[-1] for tokens in bounds], dtype=np.int64)
    bins = pack(needed.tolist(), budget) if packed else _rectangles(needed, budget)
    # sequences of a rectangle spread anew would be padded beyond the budget
    turns = bins if dealer is None else dealer.turns(bins, needed, budget if packed else 0)
    build = _packed if packed else _padded
    return [
        build(sequences, [indices[i] for i in members], needed[members], trained) if members else _idle(packed)
        for members in turns
    ]


def _idle(packed: bool) -> Microbatch:
    """One position that predicts nothing: what a rank computes while its peers have work that it takes part in."""
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


def _rectangles(needed: np.ndarray, budget: int) -> list[list[int]]:
    order = np.argsort(-needed, kind="stable").tolist()
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * needed[groups[-1][0]] <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _packed(sequences: FlatTokens, members: list[int], needed: np.ndarray, trained: np.ndarray) -> Microbatch:
    starts = np.concatenate([[0], np.cumsum(needed)[:-1]])
    positions = np.arange(int(needed.sum())) - np.repeat(starts, needed)
    tokens = np.repeat(sequences.offsets[members], needed) + positions
    source, predict = _predictions(sequences, members, starts, trained)
    return Microbatch(
        input_ids=_long(sequences.token_ids[tokens])[None],
        position_ids=_long(positions)[None],
        attention_mask=None,
        spans=tuple(_spans(needed)),
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
    )


def _predictions(
    sequences: FlatTokens, members: list[int], row_starts: np.ndarray, trained: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[M] trained tokens as indices into the token arrays, and [M] the flat position before each."""
    source, predict = [], []
    for member, row_start in zip(members, row_starts, strict=True):
        start, stop = sequences.offsets[member], sequences.offsets[member + 1]
        local = np.flatnonzero(trained[start:stop])
        source.append(start + local)
        predict.append(row_start + local - 1)
    return np.concatenate(source), np.concatenate(predict)


def _spans(lengths: np.ndarray) -> list[Span]:
    """Cut a row of sequences, longest first, where the length falls below `SPAN_RATIO` of the span's longest."""
    spans: list[Span] = []
    first, start = 0, 0
    while first < len(lengths):
        longest = int(lengths[first])
        last = first
        while last < len(lengths) and lengths[last] >= SPAN_RATIO * longest:
            last += 1
        inside = lengths[first:last]
        stop = start + int(inside.sum())
        gather, scatter = None, None
        if (inside != longest).any():
            real = np.arange(longest) < inside[:, None]
            cells = np.zeros(real.shape, dtype=np.int64)
            cells[real] = np.arange(int(inside.sum()))
            gather, scatter = _long(cells.ravel()), _long(np.flatnonzero(real.ravel()))
        spans.append(Span(start, stop, last - first, longest, gather, scatter))
        first, start = last, stop
    return spans


def _long(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
