"""Trends of a long run: slopes with their confidence, and whether a curve is a line. Pure functions of samples.

Invariant: samples that lie near one another are not taken for independent. The series is cut into blocks of equal length along
x, each block gives its median, and the confidence comes from the blocks alone.

    trend([0, 1, 2, …], [5.0, 5.1, 4.9, …])     slope 0.00 ± 0.01
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12
_STUDENT_97_5 = {8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through the blocks' medians."""

    slope: float
    """Of y for one of x."""
    margin: float
    """The slope's 95 % interval is `slope ± margin`."""
    level: float
    """Median of the last block."""
    bend: float
    """Slope of the second half of the blocks for that of the first: 1 is a line, 2 would be twice as steep at the end."""

    @property
    def is_flat(self) -> bool:
        """Whether the interval holds 0 or lies below it."""
        return self.slope - self.margin <= 0


def trend(xs: Sequence[float], ys: Sequence[float], blocks: int = BLOCKS) -> Trend:
    """The trend of y over x.

    Raises:
        ValueError: too few samples for the blocks.
    """
    centres, medians = _blocks(xs, ys, blocks)
    slope, error = _line(centres, medians)
    half = len(centres) // 2
    first, _ = _line(centres[:half], medians[:half])
    second, _ = _line(centres[half:], medians[half:])
    margin = _STUDENT_97_5[len(centres) - 2] * error
    return Trend(slope, margin, medians[-1], second / first if first else math.inf)


def _blocks(xs: Sequence[float], ys: Sequence[float], blocks: int) -> tuple[list[float], list[float]]:
    if len(xs) < 3 * blocks:
        raise ValueError(f"{len(xs)} samples are too few for {blocks} blocks of 3 and more: let it run longer")
    low, width = min(xs), (max(xs) - min(xs)) / blocks
    members: list[list[tuple[float, float]]] = [[] for _ in range(blocks)]
    for x, y in zip(xs, ys, strict=True):
        members[min(blocks - 1, int((x - low) / width))].append((x, y))
    filled = [found for found in members if found]
    if len(filled) - 2 not in _STUDENT_97_5:
        raise ValueError(f"only {len(filled)} of {blocks} blocks have samples")
    return (
        [statistics.median(x for x, _ in found) for found in filled],
        [statistics.median(y for _, y in found) for found in filled],
    )


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line, and its standard error."""
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    residual = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, math.sqrt(residual / max(1, len(xs) - 2) / spread)
