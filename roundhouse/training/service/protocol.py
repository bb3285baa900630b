"""What client and server of the HTTP train service agree on: routes, headers, JSON bodies, numbered calls, one session.

Invariant: a control call carries the protocol header (which no web page can send across origins unasked) and, where the
server has a token, the bearer token; a call that changes something carries its number (`CallLog`). Arrays travel as
safetensors (`wire`), everything else as JSON. A file is taken only when its bytes have the digest that was announced, and its
name stays inside its directory.

    GET    /health                    open to all; says nothing but that the server runs
    POST   /v1/session                OpenSession                    -> SessionOpened
    DELETE /v1/session
    POST   /v1/facts                                                 -> ModelFacts
    POST   /v1/forward/<role>         wire: TokenBatch               -> wire: LogProbs
    POST   /v1/forward_backward       wire: LossBatch, numbered      -> wire: Gradient
    POST   /v1/value_backward         wire: ValueBatch, numbered     -> wire: Gradient
    POST   /v1/optim_step             OptimStep, numbered            -> Applied
    POST   /v1/missing                FileList                       -> digests that have to be sent
    PUT    /v1/blobs/<sha256>?size=   bytes of a file
    POST   /v1/load_checkpoint        LoadCheckpoint, numbered       -> Cursor
    POST   /v1/save_checkpoint        SavedCursor, numbered          -> FileList
    GET    /v1/blobs/<sha256>                                        -> bytes of a file
    POST   /v1/load_directory         LoadDirectory, numbered        -> Cursor         resident ranks of the driver's machine
    POST   /v1/save_directory         SaveDirectory, numbered        -> {}             only (`ranks`)

Errors are JSON `{"kind": …, "message": …}`, by `ERRORS`.

Numbered calls: a lost answer is given again, work is never done twice. Call n is done only after call n - 1 was answered, and
at most once. A client that did not get its answer repeats the call with the same number and the same body and gets the
recorded one; so nothing that the network does can apply an update twice or out of order.

    number   last answered 6
    6        the recorded answer, when the body is the same; else refused
    7        to be done
    others   refused: a call is missing in between, or it belongs to the past

Sessions: at any time at most one session is valid, and a session that was replaced is never valid again. A session ends when
it is closed, when nothing was heard of it for `idle_seconds`, or when its own owner opens another one: an owner that
opens a session has lost the one before (its process died), and must not wait for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.service.verbs import Role

Body = TypeVar("Body", bound=BaseModel)

PROTOCOL = "2"
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
    "save_checkpoint",
    "load_directory",
    "save_directory",
)
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
    role: Role


class FileList(_Body):
    files: list[TransferredFile]


class Digests(RootModel[list[str]]):
    """Answer of `missing`."""


class LoadCheckpoint(_Body):
    role: Role
    files: list[TransferredFile]
    trainer_state: list[TransferredFile] | None
    """None begins optimizer and cursor anew."""


class LoadDirectory(_Body):
    """`load_checkpoint` from directories that driver and service both see."""

    role: Role
    directory: str
    trainer_state: str | None


class SavedCursor(RootModel[Cursor | None]):
    """Body of `save_checkpoint`: None writes the weights alone."""


class SaveDirectory(_Body):
    """`save_checkpoint` to a directory that driver and service both see."""

    directory: str
    cursor: Cursor | None


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


def refusal(error: RoundhouseError) -> CallReply:
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
    return CallReply(ERRORS[kind][0], body, "application/json")


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


class CallRefused(DataError):
    """A call's number or body does not follow from the calls before it."""


@dataclass(frozen=True, slots=True)
class CallReply:
    """What was said, to be said again."""

    status: int
    body: bytes
    media_type: str


class CallLog:
    """The calls of one session. Only the last answer is kept: a client has one call under way."""

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
    """The service's only session."""

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
        held = self._session
        if held is not None and held.owner != owner and now < held.heard_at + self.idle_seconds:
            left = held.heard_at + self.idle_seconds - now
            raise LeaseHeld(
                f"The train service is used by {held.owner!r}, for {left:.0f} seconds more unless it goes on. Stop that run, "
                "or start another service."
            )
        self.opened += 1
        self._session = TrainSession(secrets.token_hex(16), owner, now)
        return self._session

    def require(self, token: str, now: float) -> None:
        """Refuse any but the valid session, and note that it was heard of.

        Raises:
            SessionLost: it is not the valid one.
        """
        held = self._session
        if held is None or not secrets.compare_digest(held.token.encode(), token.encode()):
            raise SessionLost(
                "The train service does not know this session: the service was restarted, or the session ended. Its weights "
                "are lost; begin again from the checkpoint."
            )
        held.heard_at = now

    def close(self, token: str) -> None:
        """End the session, if it is the valid one."""
        if self._session is not None and secrets.compare_digest(self._session.token.encode(), token.encode()):
            self._session = None


CHUNK = 1 << 20


class TransferredFile(BaseModel):
    """One file of a directory."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """Relative, with forward slashes."""
    size: int
    sha256: str


def list_files(directory: Path) -> list[TransferredFile]:
    """All files below the directory, in order of their names."""
    return [
        TransferredFile(path=file.relative_to(directory).as_posix(), size=file.stat().st_size, sha256=digest(file))
        for file in sorted(path for path in directory.rglob("*") if path.is_file())
    ]


def digest(file: Path) -> str:
    """SHA-256 of the file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inside(directory: Path, name: str) -> Path:
    """Where a file of this name belongs.

    Raises:
        DataError: the name leads out of the directory.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or any(part in ("..", ".") for part in parts):
        raise DataError(f"The file name {name!r} leads out of its directory.")
    return directory.joinpath(*parts)


def write_checked(target: Path, chunks: Iterable[bytes], announced: TransferredFile) -> None:
    """Write a file, and keep it only when it is what was announced.

    Raises:
        DataError: size or digest differ.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    taken = hashlib.sha256()
    with partial.open("wb") as stream:
        for chunk in chunks:
            taken.update(chunk)
            stream.write(chunk)
    _adopt(partial, target, taken.hexdigest(), announced)


async def write_checked_async(target: Path, chunks: AsyncIterator[bytes], announced: TransferredFile) -> None:
    """`write_checked` for a body that arrives; it stops once more than the announced size came."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    taken, size = hashlib.sha256(), 0
    with partial.open("wb") as stream:
        async for chunk in chunks:
            size += len(chunk)
            if size > announced.size:
                break
            taken.update(chunk)
            stream.write(chunk)
    _adopt(partial, target, taken.hexdigest() if size == announced.size else "", announced)


def _adopt(partial: Path, target: Path, found: str, announced: TransferredFile) -> None:
    if found != announced.sha256:
        partial.unlink()
        raise DataError(f"{announced.path} did not arrive as it was sent: its size or digest differs.")
    os.replace(partial, target)
