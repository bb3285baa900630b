"""Evaluation, checkpoints, tracking, and where things run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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


class ResumeConfig(Section):
    """What a start does when there is something to go on from."""

    mode: Literal["auto", "disable", "from_path"] = "auto"
    """`auto` continues the run of this id after its last complete stage, or begins it. `disable` only begins: a run id that
    exists is refused. `from_path` begins from the checkpoint at `path`, weights and trainer state, and continues such a run."""
    path: str | None = None
    """Checkpoint to begin from: `<store>/runs/<run>/checkpoints/<version>`, a path or URI."""

    @model_validator(mode="after")
    def _path(self) -> Self:
        if (self.mode == "from_path") != (self.path is not None):
            given = "no resume.path" if self.path is None else f"resume.path={self.path!r}"
            raise ValueError(
                f"resume.mode={self.mode} with {given}: a path goes with from_path, and from_path with a path. Set both "
                "or none."
            )
        return self


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
