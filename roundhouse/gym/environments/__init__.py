"""The environments that come with Roundhouse, and the way to one of your own.

Invariant: `load` either returns an environment that can be used, or raises a ConfigError that names the key at fault.
"""

from __future__ import annotations

import importlib

from roundhouse.config.models import (
    CalculatorEnvironment,
    CustomEnvironment,
    EnvironmentConfig,
    GuessNumberEnvironment,
    SortEnvironment,
)
from roundhouse.errors import ConfigError
from roundhouse.gym.environment import Environment
from roundhouse.gym.environments.calculator import Calculator
from roundhouse.gym.environments.guess_number import GuessNumber
from roundhouse.gym.environments.sort import Sort

__all__ = ["Calculator", "GuessNumber", "Sort", "load"]


def load(config: EnvironmentConfig) -> Environment:
    """The environment that `config` describes, in this process.

    Raises:
        ConfigError: it cannot be imported or made, or it is a remote one.
    """
    if isinstance(config, CalculatorEnvironment):
        return Calculator(heldout_fraction=config.heldout_fraction)
    if isinstance(config, SortEnvironment):
        return Sort(digits=config.digits, heldout_fraction=config.heldout_fraction)
    if isinstance(config, GuessNumberEnvironment):
        return GuessNumber(upper=config.upper, guesses=config.guesses)
    if isinstance(config, CustomEnvironment):
        return _load_custom(config)
    raise ConfigError(
        f"environment.kind is remote ({config.url}): its tasks, tools and verifier live in that server and cannot be loaded "
        "into this process. Reach it over HTTP for rollouts; where an environment must be in process (a warm_start policy, "
        "serving it yourself), set environment.kind to calculator, sort, guess_number or custom."
    )


def _load_custom(config: CustomEnvironment) -> Environment:
    module_name, _, class_name = config.target.partition(":")
    key = f"environment.target is {config.target!r}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}: importing {module_name} failed ({error}). Install the package, or put its directory on PYTHONPATH."
        ) from error
    found: object = module
    for part in class_name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        what = f"{module_name} has no {class_name}" if found is None else f"{class_name} is not an environment class"
        raise ConfigError(f"{key}: {what}. Name a subclass of roundhouse.gym.environment.Environment.")
    try:
        return found(**config.parameters)
    except TypeError as error:
        raise ConfigError(
            f"environment.parameters {config.parameters!r} do not fit {config.target}: {error}. "
            "They are the keyword arguments of the class."
        ) from error
