"""KL to the reference as a part of the reward, and the controller of its coefficient.

Invariant: the coefficient of an iteration follows from the one before and what that iteration measured; it stands in the
trainer's cursor, so that a resumed run goes on with it.

In the reward, the KL is a constant of the sampled tokens: no gradient runs through it (`loss.reference_kl` has the one that
carries a gradient).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from roundhouse.config.objectives import AdaptiveKL
from roundhouse.training.loss import KL_INPUT_CLAMP, KL_OUTPUT_CLAMP

MAX_RELATIVE_ERROR = 0.2
"""The adaptive controller moves by at most this share a horizon, however far the KL is from its target."""


def sampled_kl(old: np.ndarray, reference: np.ndarray, estimator: Literal["k1", "k2", "k3"]) -> np.ndarray:
    """[T] KL(policy ‖ reference) at each token, clamped like the loss's; with d = reference − old: −d, d²/2, exp(d) − 1 − d."""
    d = np.clip(reference.astype(np.float64) - old, -KL_INPUT_CLAMP, KL_INPUT_CLAMP)
    values = {"k1": lambda: -d, "k2": lambda: d**2 / 2, "k3": lambda: np.expm1(d) - d}[estimator]()
    return np.clip(values, -KL_OUTPUT_CLAMP, KL_OUTPUT_CLAMP)


def to_go(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[T] sum from each token to the end of its sequence.

    Example: sequences [1 2 3 | 4 5] give [6 5 3 | 9 5].
    """
    ahead = np.cumsum(values[::-1])[::-1]
    after = np.append(ahead, 0.0)[offsets[1:]]
    return ahead - np.repeat(after, np.diff(offsets))


def next_coefficient(coefficient: float, measured: float, rollouts: int, controller: AdaptiveKL | None) -> float:
    """The coefficient after an iteration that measured this KL a token, on this many rollouts.

    Ziegler et al., arXiv 1909.08593, section 2.2. Without a controller it stays.
    """
    if controller is None:
        return coefficient
    error = min(max(measured / controller.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * (1 + error * rollouts / controller.horizon)
