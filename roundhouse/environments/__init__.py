"""The environments that come with Roundhouse, and the way to one of your own.

Invariant: `load` and `load_any` either return an environment that can be used, or raise a ConfigError that names the key at
fault. A built-in environment is a section in `roundhouse.config.environments`, a class, and a line in `BUILT_IN`: the section's
fields are the class's keyword arguments. Its module is imported when it is first asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.environments import (
    ArithmeticChainEnvironment,
    BugFixEnvironment,
    CalculatorEnvironment,
    CodeEnvironment,
    CommandEnvironment,
    CountdownEnvironment,
    CustomEnvironment,
    EnvironmentConfig,
    FrozenLakeEnvironment,
    GuessNumberEnvironment,
    InstructionConstraintsEnvironment,
    LookupEnvironment,
    MixtureEnvironment,
    NemoGymEnvironment,
    ShortQuestionsEnvironment,
    SortEnvironment,
    SqlWorldEnvironment,
    SudokuEnvironment,
    TerminalEnvironment,
    WarehouseEnvironment,
    WorkerEnvironment,
    environments_in,
)
from roundhouse.config.secrets import resolved
from roundhouse.config.section import Section
from roundhouse.environments.base import Environment, GymnasiumEnvironment, Split, TaskRow, TaskSource
from roundhouse.environments.calculator import Calculator
from roundhouse.environments.sandboxed import SandboxedEnvironment
from roundhouse.environments.search import GuessNumber
from roundhouse.environments.single_turn import Sort
from roundhouse.errors import ConfigError
from roundhouse.imports import load_class

__all__ = ["BUILT_IN", "Calculator", "GuessNumber", "Sort", "load", "load_any"]

BUILT_IN: dict[type[Section], str] = {
    CalculatorEnvironment: "calculator:Calculator",
    SortEnvironment: "single_turn:Sort",
    GuessNumberEnvironment: "search:GuessNumber",
    ArithmeticChainEnvironment: "calculator:ArithmeticChain",
    LookupEnvironment: "search:Lookup",
    CountdownEnvironment: "single_turn:Countdown",
    SudokuEnvironment: "single_turn:Sudoku",
    WarehouseEnvironment: "warehouse:Warehouse",
    SqlWorldEnvironment: "sql_world:SqlWorld",
    CodeEnvironment: "code:Code",
    TerminalEnvironment: "terminal:Terminal",
    BugFixEnvironment: "bug_fix:BugFix",
    InstructionConstraintsEnvironment: "single_turn:InstructionConstraints",
    ShortQuestionsEnvironment: "short_questions:ShortQuestions",
    FrozenLakeEnvironment: "frozen_lake:FrozenLake",
}
"""From a kind's configuration to its class in this package."""
_KINDS: tuple[type[Environment], type[GymnasiumEnvironment]] = (Environment, GymnasiumEnvironment)


def load_any(config: EnvironmentConfig) -> Environment | GymnasiumEnvironment:
    """The environment that `config` describes, in this process, whichever protocol it speaks.

    Raises:
        ConfigError: it cannot be imported or made, or it lives in another process.
    """
    if type(config) in BUILT_IN:
        return built_in(config.model_copy(update={"rubric": None, "audit": None}))
    found: Any = class_of(config)
    assert isinstance(config, CustomEnvironment), "no other kind has a class here"
    try:
        made: Environment | GymnasiumEnvironment = found(**resolved(config.parameters))
    except TypeError as error:
        raise ConfigError(
            f"environment.parameters {config.parameters!r} do not fit {config.target}: {error}. "
            "They are the keyword arguments of the class."
        ) from error
    return made


def load_to_serve(config: EnvironmentConfig) -> Environment | GymnasiumEnvironment:
    """As `load_any`, for a resources server, which has neither rubric nor audit.

    Raises:
        ConfigError: as `load_any`, or there is one of them.
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
    if type(config) not in BUILT_IN:
        raise ConfigError(_elsewhere(config))
    return load_class(f"{__name__}.{BUILT_IN[type(config)]}", _KINDS, "environment.kind")


@functools.lru_cache(maxsize=8)
def built_in(config: EnvironmentConfig) -> Environment | GymnasiumEnvironment:
    """The environment of a built-in kind; one for the same configuration, since each stage asks and generating takes time."""
    found: Any = class_of(config)
    made: Environment | GymnasiumEnvironment = found(
        **{name: getattr(config, name) for name in type(config).model_fields if name not in ("kind", "rubric", "audit")}
    )
    return made


def first_task(config: EnvironmentConfig) -> TaskRow | None:
    """The first training task, made as a run makes it: what fails at the first task fails here. None where an environment lives
    in another process, or has none. Of a mixture, the one with most tools.

    Raises:
        ConfigError: the environment or its task cannot be made.
    """
    if isinstance(config, MixtureEnvironment):
        rows = [row for each in config.environments.values() if (row := first_task(each)) is not None]
        return max(rows, key=lambda row: len(row.get("responses_create_params", {}).get("tools") or ()), default=None)
    if type(config) not in BUILT_IN and not isinstance(config, CustomEnvironment):
        return None
    environment = load_any(config)
    try:
        return next(iter(environment.tasks("train")), None)
    except Exception as error:
        raise ConfigError(
            f"environment.kind is {config.kind}: its first training task cannot be made: {type(error).__name__}: {error}. "
            "Change the section environment."
        ) from error


def check_sandboxes(config: EnvironmentConfig) -> None:
    """Start one sandbox of each environment in this process that has them, so that what is missing is found before a run.

    Raises:
        ConfigError: none can be started here.
    """
    for each in environments_in(config).values():
        if type(each) in BUILT_IN or isinstance(each, CustomEnvironment):
            environment = load_any(each)
            if isinstance(environment, SandboxedEnvironment):
                environment.check_sandbox()


class Mixture(TaskSource):
    """The environments of a mixture that can be in this process and have demonstrations: what a warm start begins with."""

    name = "mixture"

    def __init__(self, parts: Sequence[TaskSource]) -> None:
        self._parts = parts

    def parts(self) -> Sequence[TaskSource]:
        return self._parts

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [row for part in self._parts for row in part.tasks(split)]


def demonstrating(config: EnvironmentConfig) -> TaskSource:
    """What a warm start learns from: the environment; of a mixture, those in it that have demonstrations.

    Raises:
        ConfigError: as `load_any`, or no environment of the mixture has any.
    """
    if not isinstance(config, MixtureEnvironment):
        return load_any(config)
    return Mixture([load_any(each) for each in config.environments.values() if _demonstrates(each)])


def refuse_without_demonstrations(config: EnvironmentConfig) -> None:
    """Refuse an environment that a warm start cannot begin with, before anything is made of it.

    Raises:
        ConfigError: it has no `demonstrations` of its own, or cannot be imported.
    """
    if isinstance(config, MixtureEnvironment):
        if not any(_demonstrates(each) for each in config.environments.values()):
            raise without_demonstrations("mixture")
    elif class_of(config).demonstrations is TaskSource.demonstrations:
        raise without_demonstrations(class_of(config).name)


def _demonstrates(config: EnvironmentConfig) -> bool:
    in_process = isinstance(config, CustomEnvironment) or type(config) in BUILT_IN
    return in_process and class_of(config).demonstrations is not TaskSource.demonstrations


def without_demonstrations(name: str) -> ConfigError:
    """That a warm start has nothing to begin with."""
    return ConfigError(
        f"policy.kind is warm_start, but the environment {name} has no demonstrations to start on. Give it a "
        "demonstrations method, or set policy.kind to pretrained and policy.path to a model directory."
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
            "neither tools nor a verifier, which are needed here."
        )
    return environment


def environment_config(name: str, parameters: str = "{}") -> EnvironmentConfig:
    """The configuration of a kind of environment, or of `module:Class`, with JSON parameters.

    Raises:
        ConfigError: there is no such kind, or the parameters do not fit.
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


def _elsewhere(config: EnvironmentConfig) -> str:
    if isinstance(config, WorkerEnvironment):
        return (
            f"environment.kind is worker ({config.worker}): its rollouts are played by that class, which has no "
            "demonstrations and is no environment to serve. Set policy.kind to pretrained."
        )
    if isinstance(config, CommandEnvironment):
        return (
            f"environment.kind is command ({config.command[0]}): its rollouts are played by that program, which has no "
            "demonstrations and is no environment to serve. Set policy.kind to pretrained."
        )
    if isinstance(config, NemoGymEnvironment):
        return (
            f"environment.kind is nemo_gym ({', '.join(config.config_paths)}): its tasks, tools and verifiers live in the "
            "servers that the run starts, which have no demonstrations. Set policy.kind to pretrained."
        )
    if isinstance(config, MixtureEnvironment):
        return (
            f"environment.kind is mixture ({', '.join(config.environments)}), but one environment is needed here. Name one of "
            "these."
        )
    return (
        f"environment.kind is {config.kind} ({getattr(config, 'url', None)}): its tasks, tools and verifier live in that "
        "server and cannot be loaded into this process. Reach it over HTTP for rollouts; where an environment must be in "
        "process (a warm_start policy, serving it yourself), set environment.kind to calculator, sort, another built-in "
        "kind, or custom."
    )
