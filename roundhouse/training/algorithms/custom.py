"""An algorithm of your own, named as `module:Class` or `path/to/file.py:Class`.

Invariant: what comes out has the members that the trainer uses; whatever is wrong with the name, the class or its parameters is
said with the key and its value.
"""

from __future__ import annotations

from typing import Any

from roundhouse.config.algorithms import CustomAlgorithmConfig
from roundhouse.errors import ConfigError
from roundhouse.import_string import load_class
from roundhouse.training.algorithm import Algorithm

MEMBERS = ("loss", "needs_reference", "needs_log_probs", "compute")


def load_custom(config: CustomAlgorithmConfig) -> Algorithm:
    """Make `Class(config, **parameters)`.

    Raises:
        ConfigError: it cannot be imported or made, or is no `Algorithm`.
    """
    key = f"train.algorithm.target is {config.target!r}"
    found: type[Any] = load_class(config.target, object, "train.algorithm.target")
    lacking = [name for name in MEMBERS if not hasattr(found, name)]
    if lacking:
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
