"""Included environments, and loading of custom ones.

Invariant: `load` and `load_any` return a usable environment, or raise a ConfigError that names the faulty key. An
environment is a plug-in of role `environment`: a section, and a class with the section's fields as keyword arguments.
Its module is imported on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from roundhouse import plugins
from roundhouse.config.environments import (
    CustomEnvironment,
    EnvironmentConfig,
    EnvironmentSection,
    MixtureEnvironment,
    environments_in,
)
from roundhouse.config.kinds import Kinds
from roundhouse.config.secrets import resolved
from roundhouse.environments.base import Environment, GymnasiumEnvironment, Split, TaskRow, TaskSource
from roundhouse.environments.calculator import Calculator
from roundhouse.environments.sandboxed import SandboxedEnvironment
from roundhouse.environments.single_turn import Sort
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.imports import load_class
from roundhouse.user_code import describe_error

__all__ = ["Calculator", "Sort", "included_sections", "load", "load_any"]

_KINDS: tuple[type[Environment], type[GymnasiumEnvironment]] = (Environment, GymnasiumEnvironment)


def load_any(config: EnvironmentConfig) -> Environment | GymnasiumEnvironment:
    """The environment that `config` describes, in this process, whichever protocol it speaks.

    Raises:
        ConfigError: it cannot be imported or made, or it lives in another process.
    """
    if isinstance(config, CustomEnvironment):
        return _custom(config)
    if isinstance(config, MixtureEnvironment):
        raise ConfigError(config.elsewhere())
    plain = config.model_copy(update={"rubric": None, "audit": None})
    return made_once(plain) if config.is_included else _made(plain)


def _custom(config: CustomEnvironment) -> Environment | GymnasiumEnvironment:
    symbol: Any = class_of(config)
    try:
        environment: Environment | GymnasiumEnvironment = symbol(**resolved(config.parameters))
    except TypeError as error:
        raise ConfigError(
            f"environment.parameters {config.parameters!r} do not fit {config.target}: {error}. "
            "They are the keyword arguments of the class."
        ) from error
    return environment


def load_to_serve(config: EnvironmentConfig) -> Environment | GymnasiumEnvironment:
    """Load as `load_any` does, for a resources server, which has neither rubric nor audit.

    Raises:
        ConfigError: as `load_any`, or one of them is set.
    """
    for key in ("rubric", "audit"):
        if getattr(config, key, None) is not None:
            raise ConfigError(
                f"environment.{key} is set for an environment that is served, and it judges in the run. Set it at the run's "
                "environment (of kind remote, agent or nemo_gym)."
            )
    return load_any(config)


def class_of(config: EnvironmentConfig) -> type[Environment] | type[GymnasiumEnvironment]:
    """The class of that environment; nothing is made of it.

    Raises:
        ConfigError: it cannot be imported, or it lives in another process.
    """
    if isinstance(config, CustomEnvironment):
        return load_class(config.target, _KINDS, "environment.target")
    if problem := config.elsewhere():
        raise ConfigError(problem)
    symbol = plugins.factory("environment", config.kind)
    if isinstance(symbol, type) and issubclass(symbol, _KINDS):
        return symbol
    raise ConfigError(
        f"environment.kind is {config.kind}, but its plug-in returns {symbol!r}. It must be a subclass of Environment or "
        "GymnasiumEnvironment (roundhouse.environments.base). Correct the factory of the plug-in."
    )


@functools.lru_cache(maxsize=8)
def made_once(config: EnvironmentSection) -> Environment | GymnasiumEnvironment:
    """Make one environment for the same section: each stage asks, and generating takes time."""
    return _made(config)


def _made(config: EnvironmentSection) -> Environment | GymnasiumEnvironment:
    symbol: Any = class_of(config)
    own = type(config).model_fields.keys() - EnvironmentSection.model_fields.keys() - {"kind", "mcp_servers"}
    try:
        environment: Environment | GymnasiumEnvironment = symbol(**{name: getattr(config, name) for name in own})
    except TypeError as error:
        raise ConfigError(
            f"environment.kind is {config.kind}, but the class {symbol.__name__} rejects the keys of its section "
            f"({', '.join(sorted(own)) or 'none'}): {describe_error(error)}. Correct the plug-in."
        ) from error
    return environment


def included_sections() -> list[type[EnvironmentSection]]:
    """Return the sections of the environments that come with Roundhouse."""
    sections: Any = Kinds("environment").sections()
    return [each for each in sections if getattr(each, "is_included", False)]


def has_own_splits(config: EnvironmentConfig) -> bool:
    """Return whether all tasks are made by included environments: their splits are disjoint and fixed by the
    configuration."""
    files = [getattr(config, name, None) for name in ("train_tasks", "heldout_tasks")]
    return not any(files) and all(each.is_included for each in environments_in(config).values())


def first_task(config: EnvironmentConfig) -> TaskRow | None:
    """Make the first training task as a run does, so that its errors show here. Return None if the environment is in
    another process or without tasks; for a mixture, the task with most tools.

    Raises:
        ConfigError: the environment or its task cannot be made.
    """
    if config.parts:
        rows = [row for each in config.parts.values() if (row := first_task(each)) is not None]
        return max(rows, key=lambda row: len(row.get("responses_create_params", {}).get("tools") or ()), default=None)
    if config.elsewhere():
        return None
    environment = load_any(config)
    try:
        return next(iter(environment.tasks("train")), None)
    except RoundhouseError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment.kind is {config.kind}: its first training task cannot be made: {describe_error(error)}. "
            "Change the section environment."
        ) from error


def check_sandboxes(config: EnvironmentConfig) -> None:
    """Start one sandbox of each environment in this process that has them, so that faults show before a run.

    Raises:
        ConfigError: none can be started here.
    """
    for each in environments_in(config).values():
        if not each.elsewhere():
            environment = load_any(each)
            if isinstance(environment, SandboxedEnvironment):
                environment.check_sandbox()


class Mixture(TaskSource):
    """The environments of a mixture that can be in this process and have demonstrations, for a warm start."""

    name = "mixture"

    def __init__(self, parts: Sequence[TaskSource]) -> None:
        self._parts = parts

    def parts(self) -> Sequence[TaskSource]:
        return self._parts

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [row for part in self._parts for row in part.tasks(split)]


def demonstrating(config: EnvironmentConfig) -> TaskSource:
    """Return a warm start's source: the environment; for a mixture, those of its environments that have demonstrations.

    Raises:
        ConfigError: as `load_any`, or no environment of the mixture has any.
    """
    if not config.parts:
        return load_any(config)
    return Mixture([load_any(each) for each in config.parts.values() if _demonstrates(each)])


def refuse_without_demonstrations(config: EnvironmentConfig) -> None:
    """Refuse an environment without demonstrations for a warm start, before anything is made of it.

    Raises:
        ConfigError: it does not have a `demonstrations` method, or cannot be imported.
    """
    if config.parts:
        if not any(_demonstrates(each) for each in config.parts.values()):
            raise without_demonstrations("mixture")
    elif class_of(config).demonstrations is TaskSource.demonstrations:
        raise without_demonstrations(class_of(config).name)


def _demonstrates(config: EnvironmentConfig) -> bool:
    return not config.elsewhere() and class_of(config).demonstrations is not TaskSource.demonstrations


def without_demonstrations(name: str) -> ConfigError:
    """Return the error for a warm start without demonstrations."""
    return ConfigError(
        f"policy.kind is warm_start, but the environment {name} has no demonstrations. Add the method `demonstrations` to its "
        "class, or set policy.kind to pretrained and policy.path to a model directory."
    )


def load(config: EnvironmentConfig) -> Environment:
    """The environment with tools and a verifier that `config` describes, in this process.

    Raises:
        ConfigError: as `load_any`, or it speaks the Gymnasium protocol.
    """
    environment = load_any(config)
    if isinstance(environment, GymnasiumEnvironment):
        raise ConfigError(
            f"environment.kind is {config.kind}: {environment.name} speaks the Gymnasium protocol (reset, step) and has "
            "neither tools nor a verifier. This command needs both."
        )
    return environment


def environment_config(name: str, parameters: str = "{}") -> EnvironmentConfig:
    """Return the configuration of a kind of environment, or of `module:Class`, with JSON parameters.

    Raises:
        ConfigError: the kind is unknown, or the parameters do not fit.
    """
    try:
        values = orjson.loads(parameters)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--parameters is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--parameters is {parameters}: give a JSON object.")
    custom = {"kind": "custom", "target": name, "parameters": values}
    try:
        config: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(
            custom if ":" in name else {"kind": name, **values}
        )
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"--environment {name}: {problems}") from error
    return config
