"""The last check before a reward is believed.

Invariant: a reward that leaves here is a finite number, and its components, if there are any, add up to it. What is not,
fails the rollout; it never becomes a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from roundhouse.environments.base import Verdict
from roundhouse.rollout.failures import BadReward, VerifierFailed

RELATIVE_TOLERANCE = 1e-5
"""Of the sum of components against the reward, as NeMo RL has it."""


def checked_verdict(verdict: object) -> Verdict:
    """The verdict with all its numbers as finite floats.

    Raises:
        VerifierFailed: the verifier returned something else than a verdict.
        BadReward: reward, a component or a metric is no finite number, or the components do not add up.
    """
    if not isinstance(verdict, Verdict):
        raise VerifierFailed(f"verify returned a {type(verdict).__name__}; it must return a Verdict.")
    if isinstance(verdict.reward, bool):
        raise BadReward(f"reward is {verdict.reward}, a truth value; the verifier must return a number such as 1.0.")
    reward = _finite("reward", verdict.reward)
    components = _finite_all("reward_components", verdict.reward_components)
    total = math.fsum(components.values())
    if components and not math.isclose(total, reward, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-8):
        raise BadReward(f"reward is {reward}, but its components {components} add up to {total}.")
    return Verdict(reward, components, _finite_all("metrics", verdict.metrics), bool(verdict.mask))


def _finite_all(name: str, numbers: Mapping[str, Any]) -> dict[str, float]:
    return {str(key): _finite(f"{name}[{key!r}]", number) for key, number in numbers.items()}


def _finite(name: str, number: Any) -> float:
    if not isinstance(number, Real):
        raise BadReward(f"{name} is {number!r}, a {type(number).__name__}; the verifier must return a number.")
    value = float(number)
    if not math.isfinite(value):
        raise BadReward(f"{name} is {value}; the verifier must return a finite number.")
    return value
