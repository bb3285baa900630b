"""Numbers drawn from a distribution, in blocks; each purpose has a stream of its own, so that one does not shift another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from roundhouse.config.simulation import (
    Constant,
    Distribution,
    LogNormal,
    RecordedIterations,
    RolloutDistribution,
)

_BLOCK = 4096


def draw(distribution: Distribution, generator: np.random.Generator, count: int) -> np.ndarray:
    """`count` values."""
    if isinstance(distribution, Constant):
        return np.full(count, distribution.value)
    if isinstance(distribution, LogNormal):
        values = distribution.median * np.exp(distribution.sigma * generator.standard_normal(count))
        return values if distribution.limit is None else np.minimum(values, distribution.limit)
    return generator.choice(np.asarray(distribution.values), count)


def draw_rollouts(
    distribution: RolloutDistribution, generator: np.random.Generator, iterations: int, count: int
) -> np.ndarray:
    """`count` values for each of `iterations`, one after the other."""
    if not isinstance(distribution, RecordedIterations):
        return draw(distribution, generator, iterations * count)
    drawn = []
    for chosen in generator.integers(len(distribution.iterations), size=iterations):
        values = np.asarray(distribution.iterations[chosen])
        # as many as were recorded are exactly those, in another order
        drawn.append(generator.choice(values, count, replace=count > len(values)))
    return np.concatenate(drawn)


def stream(distribution: Distribution, generator: np.random.Generator) -> Iterator[float]:
    """Values without end."""
    while True:
        yield from draw(distribution, generator, _BLOCK).tolist()


def uniform(generator: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1) without end."""
    while True:
        yield from generator.random(_BLOCK).tolist()
