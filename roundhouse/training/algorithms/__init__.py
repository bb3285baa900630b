"""The algorithms, one module each: sources of columns (`training.algorithm`), registered by their configuration section.

Invariant: a section has one algorithm, its own or that of the section it extends, and only the algorithm's module knows it.
A new algorithm is two files: a section in `roundhouse.config.algorithms`, and a module in this directory, found by being here.

    @register(SignOnlyConfig)
    class SignOnly(PolicyGradientAlgorithm): ...

group_relative        grpo, dr_grpo, rloo, dapo, gspo, cispo: they differ in constants alone
gdpo                  an advantage for each reward component
reinforce_plus_plus   KL in the reward of each token, normalised over the batch
cross_entropy         likelihood of chosen rollouts
distillation          a teacher's log-probability of each token
custom                a user's own class, by `module:Class` or `path/to/file.py:Class`
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from roundhouse.config.algorithms import CustomAlgorithmConfig
from roundhouse.config.objectives import TokenLoss
from roundhouse.errors import ConfigError
from roundhouse.import_string import load_class
from roundhouse.training.algorithm import Algorithm

Factory = TypeVar("Factory", bound=Callable[..., Algorithm])

_FACTORIES: dict[type[TokenLoss], Callable[..., Algorithm]] = {}
_MEMBERS = ("loss", "needs_reference", "needs_log_probs", "compute")


def register(section: type[TokenLoss]) -> Callable[[Factory], Factory]:
    """Make the class that follows, called with the section, the algorithm of this section and of those that extend it."""

    def add(factory: Factory) -> Factory:
        _FACTORIES[section] = factory
        return factory

    return add


def build_algorithm(config: TokenLoss) -> Algorithm:
    """The algorithm of a section.

    Raises:
        ConfigError: the section has none, or a custom one cannot be imported or made.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for section in type(config).__mro__:
        if section in _FACTORIES:
            return _FACTORIES[section](config)
    raise ConfigError(
        f"No algorithm is registered for {type(config).__name__}: decorate its class with @register in a module of "
        "roundhouse/training/algorithms."
    )


@register(CustomAlgorithmConfig)
def _load_custom(config: CustomAlgorithmConfig) -> Algorithm:
    """Make `Class(config, **parameters)` of a user's own class."""
    key = f"train.algorithm.target is {config.target!r}"
    found: type[Any] = load_class(config.target, object, "train.algorithm.target")
    if lacking := [name for name in _MEMBERS if not hasattr(found, name)]:
        raise ConfigError(
            f"{key}: the class has no {', '.join(lacking)}. Subclass PolicyGradientAlgorithm "
            "(roundhouse.training.algorithms.policy_gradient), or give all of Algorithm (roundhouse.training.algorithm)."
        )
    try:
        return found(config, **config.parameters)
    except TypeError as error:
        raise ConfigError(
            f"{key}: it cannot be made with train.algorithm.parameters {config.parameters} ({error})."
        ) from error
