"""Evaluation, checkpoints, tracking, and where things run."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from roundhouse.config.approval import ApprovalConfig
from roundhouse.config.section import Operational, PositiveInt, Section


class EvaluationConfig(Section):
    """Held-out evaluation: before training, every N iterations, and at the end."""

    every: Operational[Annotated[int, Field(ge=0)] | None] = 10
    """Iterations between evaluations; 0 evaluates the last version only, null none. With null and `before_training: false` a
    run needs no held-out tasks."""
    tasks: PositiveInt = 128
    """Held-out tasks; all there are when fewer."""
    samples: PositiveInt = 1
    """Rollouts of each task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    before_training: Operational[bool] = True
    """Evaluate the starting policy too: what every later version is compared with."""
    success_threshold: Operational[float] = 1.0
    """A rollout passes (`evaluation/pass_at_*`) when its reward is at least this. 1 is a right answer in full; lower it where
    rewards are graded and less is a success, but above what a wrong answer can earn by its form."""
    promotion_confidence: Operational[Annotated[float, Field(gt=0.5, lt=1)] | None] = 0.95
    """After each evaluation, promote the version when it is better than the promoted one beyond noise: when the interval of
    this confidence around the difference, task by task, lies above 0. null promotes nothing."""
    approval: Operational[ApprovalConfig] = ApprovalConfig()


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
    """Sample conversations logged at each evaluation, as text and as traces."""
    register_as: str | None = "{run_id}"
    """Name of the registered model that gets a version for each evaluated checkpoint; null registers none."""
    system_metrics: bool = True
    """Log CPU, memory, disk and network of the run's machine every ten seconds."""

    @field_validator("register_as")
    @classmethod
    def _names_a_model(cls, value: str | None) -> str | None:
        try:
            name = (value or "").format(run_id="x")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{value!r}: only {{run_id}} may stand in braces ({error!r})") from None
        if value is not None and (not name or set(name) & set("/:")):
            raise ValueError(f"{value!r}: a registered model's name is not empty and has neither / nor :")
        return value


DatabaseUrl = Annotated[str, Field(pattern=r"^[a-z0-9]+(\+[a-z0-9]+)?://")]
"""Without a password, which a configuration does not hold: PGPASSWORD, or the file that PGPASSFILE names."""


class PrefectServerSettings(Section):
    """The local Prefect server."""

    database_url: DatabaseUrl | None = None
    """Where it keeps its data, such as postgresql+asyncpg://prefect@host/prefect. Unset: SQLite in `state`."""


class MLflowServerSettings(Section):
    """The local MLflow server."""

    backend_store_uri: DatabaseUrl | None = None
    """Where it keeps its runs, such as postgresql://mlflow@host/mlflow, which needs psycopg2. Unset: SQLite in `state`.
    Artifacts stay in `state`."""


class LocalInfra(Section):
    """Processes on this machine, Ray local."""

    kind: Literal["local"] = "local"
    state: str = ".roundhouse"
    """Directory of service state and logs."""
    prefect: PrefectServerSettings = PrefectServerSettings()
    mlflow: MLflowServerSettings = MLflowServerSettings()

    @model_validator(mode="after")
    def _drivers(self) -> LocalInfra:
        url = self.prefect.database_url
        if url is not None and not url.startswith(("postgresql+asyncpg://", "sqlite+aiosqlite://")):
            raise ValueError(
                f"infra.prefect.database_url is {url!r}: Prefect takes postgresql+asyncpg://user@host/database "
                "(or sqlite+aiosqlite)."
            )
        return self
