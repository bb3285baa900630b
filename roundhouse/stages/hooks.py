"""Stages of the user, by `stages.after_…`: a function's metrics are committed as a stage of its name.

Invariant: a function runs once in an iteration; of a complete stage, the metrics are read. It gets stored data and changes
none of it.

    def difficulty(run, iteration, sequences):                       # stages: {after_validate: [measure.py:difficulty]}
        rewards = read_table(sequences, "sequences").column("reward")
        return {"mean": pc.mean(rewards).as_py()}                    # reported as difficulty/mean
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from roundhouse import plugins
from roundhouse.config.models import RunConfig
from roundhouse.config.stages import hook_name
from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import load_function
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, StageKind
from roundhouse.user_code import describe_error

Hook = Callable[[Run, int, Reference], Mapping[str, float]]


def hook_of(target: str, key: str) -> Hook:
    """Import the function of a stage.

    Raises:
        ConfigError: it cannot be imported, or has the name of a built-in stage.
    """
    if (name := hook_name(target)) in set(StageKind):
        raise ConfigError(f"{key} names {target}, but {name} is a built-in stage. Rename the function.")
    return load_function(target, key) if ":" in target else plugins.factory("stage_hook", target)


def refuse_unfit_hooks(config: RunConfig) -> None:
    """Refuse a function that cannot be imported, before a run starts.

    Raises:
        ConfigError: as `hook_of`.
    """
    for place, targets in config.stages:
        for target in targets:
            hook_of(target, f"stages.{place}")


def run_hook(run: Run, iteration: int, target: str, key: str, reference: Reference) -> Reference:
    """Run a stage of the user, or return it if it is complete.

    Args:
        reference: of the stage before.

    Raises:
        ConfigError: as `hook_of`.
        DataError: the function raised an error, or returned something else than finite numbers by name.
    """
    name = hook_name(target)
    stage = run.stage(iteration, name)
    if (stage_reference := stage.reference()) is not None:
        return stage_reference
    hook = hook_of(target, key)
    attempt = run.begin(stage, policy_version=reference.policy_version)
    try:
        metrics: Any = hook(run, iteration, reference)
    except Exception as error:
        raise DataError(f"{key}: {target} raised {describe_error(error)}.") from error
    return attempt.commit(inputs={reference.kind: reference}, metrics=_checked(metrics, name, f"{key}: {target}"))


def _checked(metrics: Any, name: str, place: str) -> dict[str, float]:
    """Return the metrics with the name of the stage in front."""
    if not isinstance(metrics, Mapping):
        raise DataError(
            f"{place} returned a {type(metrics).__name__}. Return numbers by name, such as {{'mean': 0.5}}."
        )
    for key, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"{place} returned {value!r} for {key!r}. Return finite numbers.")
    return {f"{name}/{key}": float(value) for key, value in metrics.items()}
