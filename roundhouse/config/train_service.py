"""Where an iteration's training runs: one section a kind of train service.

Invariant: the kind never changes what is computed. With one CPU thread and the same versions of the libraries, every kind
writes the same weights, bit for bit.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from roundhouse.config.secrets import VariableName
from roundhouse.config.section import PositiveFloat, PositiveInt, Section, is_recorded

TOKEN_VARIABLE = "ROUNDHOUSE_TRAIN_TOKEN"


class ResidentService(Section):
    """In the process of the train stage, kept in memory between iterations."""

    kind: Literal["resident"] = "resident"


class ProcessService(Section):
    """A process for each step, as a Kubernetes Job runs it; it reads from the store and writes to it."""

    kind: Literal["process"] = "process"
    processes: PositiveInt = 1
    """Above 1, torchrun starts this many, which share the work."""
    timeout_seconds: PositiveFloat = 3600
    """Time limit of a step; the process is ended after it."""


class RayService(Section):
    """An actor on a Ray cluster, kept between iterations."""

    kind: Literal["ray"] = "ray"
    address: str | None = None
    """Cluster to join; unset joins the one this process is in, else starts a local one."""
    cpus: PositiveFloat = 1
    gpus: Annotated[float, Field(ge=0)] = 0
    """Reserved for the actor: 1, or a part of one that it shares. It trains on one GPU."""
    timeout_seconds: PositiveFloat = 3600
    """Time limit of one verb, the wait for free resources included."""

    @model_validator(mode="after")
    def _one_gpu(self, info: ValidationInfo) -> Self:
        if self.gpus > 1 and not is_recorded(info):
            raise ValueError(
                f"train.service.gpus is {self.gpus:g}, but the actor trains on one GPU: the others would be reserved and "
                f"idle. Set it to 1, or train.service to {{kind: process, processes: {self.gpus:.0f}}}, which shares the work."
            )
        return self


class RemoteService(Section):
    """A server over HTTP (`python -m roundhouse.training.service.server`)."""

    kind: Literal["remote"] = "remote"
    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    token_variable: VariableName = TOKEN_VARIABLE
    """Environment variable that holds the bearer token."""
    token_file: str | None = None
    """File that holds it instead, such as a mounted secret."""
    timeout_seconds: PositiveFloat = 600
    """Time limit of one request."""
    retry_seconds: Annotated[float, Field(ge=0)] = 120
    """How long a request whose answer did not arrive is repeated."""


TrainServiceConfig = Annotated[
    ResidentService | ProcessService | RayService | RemoteService, Field(discriminator="kind")
]
