"""Contract between client and server of the HTTP train service: routes, headers, JSON bodies, numbered calls, one
session.

Invariant: a control call carries the protocol header (which web pages cannot send across origins) and, if the server
has one, the bearer token; a changing call carries its number (`CallLog`). Arrays travel as safetensors (`wire`),
everything else as JSON. The server reads and writes checkpoints in the store with its own credentials; only names and
digests are exchanged.

    GET    /health · /v1/alive        liveness · the same as a client's heartbeat
    POST   /v1/session                OpenSession                    -> SessionOpened            (DELETE closes it)
    POST   /v1/facts                                                 -> ModelFacts
    POST   /v1/forward/<role>         wire: TokenBatch               -> wire: LogProbs
    POST   /v1/forward_backward       wire: LossBatch, numbered      -> wire: Gradient
    POST   /v1/value_backward         wire: ValueBatch, numbered     -> wire: Gradient
    POST   /v1/optim_step             OptimStep, numbered            -> Applied
    POST   /v1/load_checkpoint        LoadCheckpoint, numbered       -> Cursor
    POST   /v1/store_checkpoint       StoreCheckpoint, numbered      -> ModelFiles
    POST   /v1/begin_transfer         BeginTransfer, numbered        -> TransferBegun            (/v1/end_transfer ends it)

Errors are JSON `{"kind": …, "message": …}`, by `ERRORS`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError, StoreError
from roundhouse.store.directories import StoredModel
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.service.verbs import Role
from roundhouse.weight_sync.sending import AnyOffer

Body = TypeVar("Body", bound=BaseModel)

PROTOCOL = "7"
PROTOCOL_HEADER = "x-roundhouse-protocol"
SESSION_HEADER = "x-roundhouse-session"
NUMBER_HEADER = "x-roundhouse-call"
ARRAYS = "application/x-safetensors"

READING = ("facts", *(f"forward/{role}" for role in Role))
CHANGING = (
    "forward_backward",
    "value_backward",
    "optim_step",
    "load_checkpoint",
    "store_checkpoint",
    "begin_transfer",
    "end_transfer",
)
"""The verbs: those of the first kind may be asked at any time, those of the second are numbered."""

ERRORS: dict[str, tuple[int, type[RoundhouseError]]] = {
    "data": (422, DataError),
    "config": (400, ConfigError),
    "unauthorized": (401, ConfigError),
    "busy": (409, InfraError),
    "session": (410, InfraError),
    "store": (507, StoreError),
    "infra": (500, InfraError),
}
"""HTTP status and the client's exception."""


class Unauthorized(ConfigError):
    """A control call without the token."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenSession(_Body):
    """Begin; the owner's session before, if any, ends."""

    owner: str
    """Owner of the session, such as the run's uid; a restarted process sends the same."""
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
    role: Role


class LoadCheckpoint(_Body):
    role: Role
    model: StoredModel
    trainer_state: StoredModel | None
    """None begins optimizer and cursor anew."""


class StoreCheckpoint(_Body):
    place: str
    """URI of the checkpoint."""
    attempt: str = Field(pattern=r"^[0-9a-zA-Z]{1,20}$")
    cursor: Cursor | None
    """None writes the weights alone."""
    weights: bool = True
    """False writes the trainer's state alone."""


class BeginTransfer(_Body):
    offer: AnyOffer
    digest: str
    """Digest of the checkpoint with the required weights."""


class SavedCursor(RootModel[Cursor | None]):
    """Message to the ranks about a save."""


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
        raise DataError(f"The body is not a {kind.__name__}: {error}") from error


def refusal(error: RoundhouseError) -> CallReply:
    """An error as an answer."""
    kinds = (
        ("unauthorized", Unauthorized),
        ("busy", LeaseHeld),
        ("session", SessionLost),
        ("data", DataError),
        ("config", ConfigError),
        ("infra", InfraError),  # a full disk is of both kinds
        ("store", StoreError),
    )
    kind = next((name for name, error_type in kinds if isinstance(error, error_type)), "infra")
    body = json.dumps({"kind": kind, "message": str(error)}).encode()
    return CallReply(ERRORS[kind][0], body, "application/json")


def accepted(status: int, body: bytes) -> bytes:
    """The body of an answer, or the error that it is.

    Raises:
        RoundhouseError: of the kind in `ERRORS`.
    """
    if status < 300:
        return body
    try:
        reply = json.loads(body)
        raised, message = ERRORS[reply["kind"]][1], str(reply["message"])
    except (ValueError, KeyError, TypeError) as error:
        raise InfraError(
            f"The answer has status {status} and is not an answer of a train service: {body[:200]!r}"
        ) from error
    raise raised(message)


class CallRefused(DataError):
    """A call's number or body does not follow from the calls before it."""


@dataclass(frozen=True, slots=True)
class CallReply:
    """A recorded answer, to be repeated."""

    status: int
    body: bytes
    media_type: str


class CallLog:
    """Numbered calls of one session. Only the last answer is kept, because a client has one call in flight.

    Invariant: call n runs only after call n - 1 was answered, and at most once. A client without an answer repeats the
    number and body and gets the recorded answer, so the network cannot apply an update twice or out of order. A number
    out of sequence is refused.
    """

    def __init__(self) -> None:
        self._last = 0
        self._digest = ""
        self._answer: CallReply | None = None

    def admit(self, number: int, verb: str, body: bytes) -> CallReply | None:
        """The recorded answer of a repeated call; None when the call is to be done.

        Raises:
            CallRefused: the number is neither the last one nor the next, or a repeated call differs from the first.
        """
        if number == self._last + 1:
            return None
        if number != self._last or self._answer is None:
            raise CallRefused(
                f"Call {number} ({verb}) does not follow call {self._last}, the last that was answered. Open a new session and "
                "load a checkpoint."
            )
        if _digest(verb, body) != self._digest:
            raise CallRefused(f"Call {number} was made before with another content. Open a new session.")
        return self._answer

    def record(self, number: int, verb: str, body: bytes, answer: CallReply) -> None:
        """The call was done."""
        self._last, self._digest, self._answer = number, _digest(verb, body), answer


def _digest(verb: str, body: bytes) -> str:
    return hashlib.sha256(verb.encode() + b"\0" + body).hexdigest()


class LeaseHeld(InfraError):
    """Another owner uses the service."""


class SessionLost(InfraError):
    """The session is not the valid one: the service was restarted, or the session ended."""


@dataclass(slots=True)
class TrainSession:
    """A valid session."""

    token: str
    owner: str
    heard_at: float
    """Seconds of a monotonic clock."""


class SessionLease:
    """The service's only session.

    Invariant: at most one session is valid, and a replaced one is never valid again. It ends by closing, after
    `idle_seconds` of silence, or when its owner opens another one, because then the owner has lost it (its process
    died).
    """

    def __init__(self, idle_seconds: float) -> None:
        self.idle_seconds = idle_seconds
        self.opened = 0
        """Sessions so far."""
        self._session: TrainSession | None = None

    def open(self, owner: str, now: float) -> TrainSession:
        """A new session for the owner.

        Raises:
            LeaseHeld: another owner's session is valid.
        """
        session = self._session
        if session is not None and session.owner != owner and now < session.heard_at + self.idle_seconds:
            left = session.heard_at + self.idle_seconds - now
            raise LeaseHeld(
                f"The train service belongs to {session.owner!r}, for {left:.0f} seconds more, and longer if it continues. "
                "Stop that run, or start another service."
            )
        self.opened += 1
        self._session = TrainSession(secrets.token_hex(16), owner, now)
        return self._session

    def require(self, token: str, now: float) -> None:
        """Refuse any but the valid session, and note that it was heard of.

        Raises:
            SessionLost: it is not the valid one.
        """
        session = self._session
        if session is None or not secrets.compare_digest(session.token.encode(), token.encode()):
            raise SessionLost(
                "The train service does not know this session: the service was restarted, or the session ended. Its weights "
                "are lost; begin again from the checkpoint."
            )
        session.heard_at = now

    def close(self, token: str) -> None:
        """End the session, if it is the valid one."""
        if self._session is not None and secrets.compare_digest(self._session.token.encode(), token.encode()):
            self._session = None
