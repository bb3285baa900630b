"""Scenario of a simulation: plan, machines, durations and failure rates.

Invariant: equal scenarios give equal results; all randomness comes from `seed`, and a rollout's length does not depend
on the mode, so modes are compared on the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from roundhouse.config.loading import apply_override
from roundhouse.config.rollout import Asynchrony
from roundhouse.config.section import PositiveFloat, PositiveInt, ProperFraction, Section
from roundhouse.config.yaml_text import read_yaml
from roundhouse.errors import ConfigError
from roundhouse.shipped import shipped


class Constant(Section):
    """Always the same."""

    kind: Literal["constant"]
    value: Annotated[float, Field(ge=0)]


class LogNormal(Section):
    """Many short, few long: the shape of rollout lengths."""

    kind: Literal["log-normal"]
    median: PositiveFloat
    sigma: Annotated[float, Field(ge=0)] = 1.0
    """Standard deviation of the logarithm."""
    limit: PositiveFloat | None = None
    """The longest: a limit of tokens or time. Unset: none."""


class Measured(Section):
    """Drawn from measurements, each value once before any repeats."""

    kind: Literal["measured"]
    values: Annotated[tuple[float, ...], Field(min_length=1)]


class RecordedIterations(Section):
    """Rollouts of a simulated iteration are those of a recorded one, in order: slow iterations stay slow as a whole."""

    kind: Literal["recorded-iterations"]
    iterations: Annotated[tuple[Annotated[tuple[float, ...], Field(min_length=1)], ...], Field(min_length=1)]


Distribution = Annotated[Constant | LogNormal | Measured, Field(discriminator="kind")]
RolloutDistribution = Annotated[Constant | LogNormal | Measured | RecordedIterations, Field(discriminator="kind")]


class EngineScenario(Section):
    """Replicas that generate.

    All rollouts in a replica's slots advance by one unit of work in `step_seconds + step_seconds_per_rollout * running`. With
    the defaults a unit is a second; with a decode step's measured times it is a token.
    """

    replicas: PositiveInt = 8
    slots: PositiveInt = 32
    """Rollouts that a replica runs at once."""
    step_seconds: PositiveFloat = 1.0
    step_seconds_per_rollout: Annotated[float, Field(ge=0)] = 0.0
    prefill_work: Annotated[float, Field(ge=0)] = 0.0
    """Units of work before a rollout's first token."""
    refit_seconds: Distribution = Constant(kind="constant", value=5.0)
    """From the decision to give a replica new weights until it proved that it holds them; it generates nothing meanwhile."""
    gpus: PositiveInt = 1
    """GPUs of a replica; only reported."""


class TrainerScenario(Section):
    """Time of a batch until its version is stored."""

    seconds: Distribution = Constant(kind="constant", value=60.0)
    """Validate, train and checkpoint."""
    gpus: PositiveInt = 8


class FaultScenario(Section):
    """Rates of failures."""

    rollout: ProperFraction = 0.0
    """Share of attempts that end in a failure, after all their work."""
    attempts: PositiveInt = 3
    """Attempts at a rollout; the last failure stays on record."""
    transfer: ProperFraction = 0.0
    training: ProperFraction = 0.0
    replica_hours: PositiveFloat | None = None
    """Mean hours until a replica is lost, with its running rollouts. Unset: never."""
    replica_return_seconds: Annotated[float, Field(ge=0)] = 120.0


class Scenario(Section):
    """One simulated run."""

    seed: Annotated[int, Field(ge=0)] = 0
    iterations: PositiveInt = 50
    groups: PositiveInt = 32
    """Groups of an iteration."""
    group_size: PositiveInt = 8
    asynchrony: Asynchrony = Asynchrony()
    rollout: RolloutDistribution = LogNormal(kind="log-normal", median=60.0)
    """Work of a rollout, in the engine's units."""
    engine: EngineScenario = EngineScenario()
    trainer: TrainerScenario = TrainerScenario()
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Versions between evaluations; 0 for none."""
    evaluation_seconds: Annotated[float, Field(ge=0)] = 60.0
    faults: FaultScenario = FaultScenario()

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.faults.transfer > 0.9 or self.faults.training > 0.9:
            raise ValueError(
                f"faults.transfer is {self.faults.transfer} and faults.training {self.faults.training}: above 0.9 next to "
                "nothing succeeds and the simulation does not end. Lower them."
            )
        return self


def scenario_tree(file: Path | None, overrides: Sequence[str], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """The keys of a scenario: `base`, then those of a YAML file, then overrides such as `engine.replicas=16`.

    Raises:
        ConfigError: the file cannot be read.
    """
    tree = dict(base or {})
    if file is not None:
        read = read_yaml(shipped(file)) or {}
        if not isinstance(read, dict):
            raise ConfigError(
                f"{file} holds a {type(read).__name__}, not a mapping of keys. See configs/simulation/example.yaml."
            )
        tree |= read
    for override in overrides:
        apply_override(tree, override)
    return tree


def parse_scenario(tree: dict[str, Any]) -> Scenario:
    """Validate the keys of a scenario.

    Raises:
        ConfigError: names each key that cannot be, its value and why.
    """
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"]) or "scenario"
            value = "" if item["type"] in ("missing", "value_error") else f" (given: {item['input']!r})"
            lines.append(f"  {where}: {item['msg'].removeprefix('Value error, ')}{value}")
        raise ConfigError("The scenario cannot be simulated:\n" + "\n".join(lines)) from None
