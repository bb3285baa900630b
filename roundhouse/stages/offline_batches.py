"""The data cursor of offline training: which groups of which dataset iteration k trains on.

Invariant: the answer depends on the datasets' groups, the batch size, the seed and k alone, so a run that was killed goes on
with exactly the batch that it was at. An epoch has every group once; a batch has groups of one dataset version, so that
all of it was sampled by one policy; batches of a version differ in size by at most one group.

    versions a (5 groups), b (2), size 2      epoch 1:  a[3 0] b[1 0] a[2] a[4 1]      epoch 2: another order
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from roundhouse.trajectories.tokens import derive_seed


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """What one iteration trains on."""

    epoch: int
    """From 1."""
    number: int
    """In the epoch, from 1."""
    dataset: int
    """Index of the dataset version."""
    groups: tuple[str, ...]


def batches_of_an_epoch(sizes: Sequence[int], size: int) -> int:
    """How many batches an epoch has.

    Args:
        sizes: groups of each dataset version.
        size: groups of a batch, at most.
    """
    return sum(-(-groups // size) for groups in sizes)


def batch_at(groups: Sequence[Sequence[str]], size: int, seed: int, position: int) -> OfflineBatch:
    """The batch at this position of the run, from 0.

    Args:
        groups: ids of each dataset version, in a fixed order.
    """
    count = batches_of_an_epoch([len(own) for own in groups], size)
    epoch, number = divmod(position, count)
    dataset, own = _epoch(groups, size, seed, epoch)[number]
    return OfflineBatch(epoch + 1, number + 1, dataset, own)


def _epoch(groups: Sequence[Sequence[str]], size: int, seed: int, epoch: int) -> list[tuple[int, tuple[str, ...]]]:
    shuffle = random.Random(derive_seed(seed, "offline epoch", epoch))
    batches = []
    for index, own in enumerate(groups):
        order = list(own)
        shuffle.shuffle(order)
        count = -(-len(order) // size)
        bounds = [round(part * len(order) / count) for part in range(count + 1)] if count else []
        batches += [(index, tuple(order[bounds[part] : bounds[part + 1]])) for part in range(count)]
    shuffle.shuffle(batches)
    return batches
