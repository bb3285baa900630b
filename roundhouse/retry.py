"""Pauses between the attempts of a repeated call.

Invariant: the n-th pause is `first * factor ** (n - 1)`, at most `longest`; with `spread`, a random share of it, so
that many clients do not retry in step. The caller decides when to stop: by time, by count, or never.

    >>> [Backoff(0.1, longest=0.5).pause(n) for n in (1, 2, 3, 4)]
    [0.1, 0.2, 0.4, 0.5]
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_MOST_STEPS = 64
"""An endless loop counts further than a float's exponent reaches."""


@dataclass(frozen=True)
class Backoff:
    """Growing pauses, in seconds."""

    first: float
    longest: float = math.inf
    factor: float = 2.0
    spread: float = 0.0
    """0.5: the pause is drawn from 0.5 to 1.5 times its length."""

    def pause(self, attempt: int) -> float:
        """Seconds after the failed attempt of this number; the first is 1."""
        length = min(self.longest, self.first * self.factor ** min(attempt - 1, _MOST_STEPS))
        return length * random.uniform(1 - self.spread, 1 + self.spread) if self.spread else length
