"""An algorithm of your own, named as `module:Class`.

Invariant: what comes out has the members that the trainer uses; whatever is wrong with the name, the class or its parameters is
said with the key and its value.
"""

from __future__ import annotations

import importlib

from roundhouse.config.algorithms import CustomAlgorithm
from roundhouse.errors import ConfigError
from roundhouse.training.algorithm import Algorithm

MEMBERS = ("loss", "needs_reference", "needs_log_probs", "stamp")


def load_custom(config: CustomAlgorithm) -> Algorithm:
    """Make `Class(config, **parameters)`.

    Raises:
        ConfigError: it cannot be imported or made, or is no `Algorithm`.
    """
    module_name, _, class_name = config.target.partition(":")
    key = f"train.algorithm.target is {config.target!r}"
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}: importing {module_name} failed ({error}). Install the package, or put its directory on PYTHONPATH."
        ) from error
    for part in class_name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ConfigError(f"{key}: {module_name} has no class {class_name}.")
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
