"""Evaluation, checkpoints, tracking, and where things run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roundhouse.config.section import PositiveInt, Section


class EvaluationConfig(Section):
    """Held-out evaluation: before training, every N iterations, and at the end."""

    every: Annotated[int, Field(ge=0)] = 10
    """Iterations between evaluations; 0 evaluates only before and after."""
    tasks: PositiveInt = 128
    """Held-out tasks; all there are when fewer."""
    samples: PositiveInt = 1
    """Rollouts of each task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0


class CheckpointConfig(Section):
    """Which checkpoints are kept. The newest complete one and version 0 always are."""

    keep_last: PositiveInt = 3
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Keep each version divisible by this for good; 0 keeps none beyond `keep_last`."""


class TrackingConfig(Section):
    """MLflow."""

    enabled: bool = True
    uri: str | None = None
    """Tracking server. Unset: MLFLOW_TRACKING_URI, else the local services' server."""
    experiment: str = "roundhouse"
    conversations: Annotated[int, Field(ge=0)] = 4
    """Sample conversations logged at each evaluation."""


class LocalInfra(Section):
    """Processes on this machine, Ray local."""

    kind: Literal["local"] = "local"
    state: str = ".roundhouse"
    """Directory of service state and logs."""
