"""What client and server of the HTTP train service agree on: routes, headers, JSON bodies.

Invariant: a control call carries the protocol header (which no web page can send across origins unasked) and, where the
server has a token, the bearer token; a call that changes something carries its number (`calls.CallLog`). Arrays travel as
safetensors (`wire`), everything else as JSON.

    GET    /health                    open to all; says nothing but that the server runs
    POST   /v1/session                OpenSession                    -> SessionOpened
    DELETE /v1/session
    POST   /v1/facts                                                 -> ModelFacts
    POST   /v1/forward/<role>         wire: TokenBatch               -> wire: LogProbs
    POST   /v1/forward_backward       wire: LossBatch, numbered      -> wire: Gradient
    POST   /v1/optim_step             OptimStep, numbered            -> Applied
    POST   /v1/missing                FileList                       -> digests that have to be sent
    PUT    /v1/blobs/<sha256>?size=   bytes of a file
    POST   /v1/load_checkpoint        LoadCheckpoint, numbered       -> Cursor
    POST   /v1/save_checkpoint        Cursor, numbered               -> FileList
    GET    /v1/blobs/<sha256>                                        -> bytes of a file

Errors are JSON `{"kind": …, "message": …}`, by `ERRORS`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError
from roundhouse.training.service.calls import Answer
from roundhouse.training.service.files import TransferredFile
from roundhouse.training.service.lease import LeaseHeld, SessionLost
from roundhouse.training.service.verbs import Role

Body = TypeVar("Body", bound=BaseModel)

PROTOCOL = "1"
PROTOCOL_HEADER = "x-roundhouse-protocol"
SESSION_HEADER = "x-roundhouse-session"
NUMBER_HEADER = "x-roundhouse-call"
ARRAYS = "application/x-safetensors"

READING = ("facts", "forward/policy", "forward/reference")
CHANGING = ("forward_backward", "optim_step", "load_checkpoint", "save_checkpoint")
"""The verbs: those of the first kind may be asked at any time, those of the second are numbered."""

ERRORS: dict[str, tuple[int, type[RoundhouseError]]] = {
    "data": (422, DataError),
    "config": (400, ConfigError),
    "unauthorized": (401, ConfigError),
    "busy": (409, InfraError),
    "session": (410, InfraError),
    "infra": (500, InfraError),
}
"""HTTP status, and what the client raises."""


class Unauthorized(ConfigError):
    """A control call without the token."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenSession(_Body):
    """Begin; the owner's session before, if any, ends."""

    owner: str
    """Who trains, such as the run's uid: what a process that restarts says again."""
    config: TrainConfig
    """Its `device` and `threads` are the server's own business and not used."""
    temperature: float


class SessionOpened(_Body):
    session: str
    idle_seconds: float
    """Silence after which another owner may take over."""


class OptimStep(_Body):
    learning_rate: float
    max_grad_norm: float


class FileList(_Body):
    files: list[TransferredFile]


class Digests(RootModel[list[str]]):
    """Answer of `missing`."""


class LoadCheckpoint(_Body):
    role: Role
    files: list[TransferredFile]
    trainer_state: list[TransferredFile] | None
    """None begins optimizer and cursor anew."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The answer of `forward`."""

    log_probs: np.ndarray
    """[T] float32."""


def parse(kind: type[Body], body: bytes) -> Body:
    """A JSON body.

    Raises:
        DataError: it is not of this kind.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise DataError(f"The body is no {kind.__name__}: {error}") from error


def refusal(error: RoundhouseError) -> Answer:
    """An error as an answer."""
    kinds = (
        ("unauthorized", Unauthorized),
        ("busy", LeaseHeld),
        ("session", SessionLost),
        ("data", DataError),
        ("config", ConfigError),
    )
    kind = next((name for name, held in kinds if isinstance(error, held)), "infra")
    body = json.dumps({"kind": kind, "message": str(error)}).encode()
    return Answer(ERRORS[kind][0], body, "application/json")


def accepted(status: int, body: bytes) -> bytes:
    """The body of an answer, or the error that it is.

    Raises:
        RoundhouseError: of the kind in `ERRORS`.
    """
    if status < 300:
        return body
    try:
        told = json.loads(body)
        raised, message = ERRORS[told["kind"]][1], str(told["message"])
    except (ValueError, KeyError, TypeError) as error:
        raise InfraError(f"The answer has status {status} and is none of a train service: {body[:200]!r}") from error
    raise raised(message)
