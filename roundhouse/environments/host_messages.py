"""Messages between a process of user code and the process that starts it.

A frame is its length, a letter for its encoding, and JSON. Shared memory shows which call runs where.
"""

from __future__ import annotations

import json
import os
from numbers import Real
from typing import Any, NamedTuple

import orjson

from roundhouse.errors import DataError, InfraError
from roundhouse.user_code import describe_error, message_of

MOST_BYTES = 2**28
"""Of one message: what code returns is copied several times in the collector's memory."""
MOST_WORKERS, MOST_THREADS = 256, 1024
SLOT = 3
"""Numbers of a worker in shared memory: thread, call, time at which the call began to run. The first number is the counter."""
SHARED_BYTES = 8 * (1 + SLOT * (MOST_WORKERS + MOST_THREADS))
OPEN, CANCEL, DROP, ANSWER = "open", "cancel", "drop", "answer"
"""Operations without a reply: begin a session that needs no code for it, end a call, forget a session, answer a question."""


class Failure(NamedTuple):
    """An error of a call, in a form that every process can read."""

    kind: str
    """`infra`, `data`, or `other` for an error that is not Roundhouse's; `moved` for a session that changed its worker."""
    name: str
    text: str
    shown: str
    """The error with its place in the user's code (`describe_error`)."""


class Refused(Exception):
    """The answer to a question of hosted code is an error that is neither an InfraError nor a DataError."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.name = failure.name


def typed_error(failure: Failure) -> InfraError | DataError | None:
    """Return the typed error with this failure code as its name; None for other errors."""
    if failure.kind not in ("infra", "data"):
        return None
    base: type[InfraError | DataError] = InfraError if failure.kind == "infra" else DataError
    error: InfraError | DataError = type(failure.name, (base,), {})(failure.text)
    return error


def place_of(frames: list[tuple[str, int, str]]) -> str:
    """Return `file:line in function` of the innermost frame outside of Python's library; empty without frames."""
    library = os.path.dirname(os.__file__) + os.sep
    own = [frame for frame in frames if not frame[0].startswith((library, "<"))]
    file, line, function = (own or frames or [("", 0, "")])[0]
    return f"{file}:{line} in {function}" if file else ""


def framed(message: tuple[Any, ...]) -> bytes:
    """Return a message as JSON, with its length in front. Python's JSON keeps NaN and long integers.

    Raises:
        TypeError, ValueError: a part is not a JSON value, or the message is too long.
    """
    return _with_length(b"j", _ENCODER.encode(message).encode())


def framed_reply(number: int, value: Any) -> bytes:
    """Return the frame of a call's result: quickly, if the result has small parts without NaN, as most have.

    Raises:
        TypeError, ValueError: a part is not a JSON value.
    """
    message = (number, "returned", value)
    return framed_quickly(message) if _has_no_nan(value) else framed(message)


def _has_no_nan(value: Any, depth: int = 3) -> bool:
    """Return whether a look at a few parts shows that a value does not contain NaN."""
    kind = type(value)
    if kind is float:
        return value - value == 0.0
    if kind is dict:
        return depth > 0 and len(value) <= _FEW and all(_has_no_nan(part, depth - 1) for part in value.values())
    return kind in _WITHOUT_NAN


_FEW = 16
_WITHOUT_NAN = {str, int, bool, type(None)}


def framed_quickly(message: tuple[Any, ...]) -> bytes:
    """Frame as `framed` does, for values without NaN, such as a Responses object or a call's arguments."""
    try:
        return _with_length(b"o", orjson.dumps(message))
    except TypeError:  # a long integer, or half a character
        return framed(message)


def read_message(data: bytes | memoryview) -> list[Any]:
    """Return the message of a frame without its length."""
    content: list[Any] = orjson.loads(data[1:]) if data[0] == _QUICK else json.loads(bytes(data[1:]))
    return content


def take_messages(received: bytearray) -> list[list[Any]]:
    """Remove whole frames from the received bytes, and return their messages.

    Raises:
        ValueError: the bytes are not frames, for example if user code wrote into a file descriptor that it did not
            open.
    """
    messages, begin, size = [], 0, len(received)
    with memoryview(received) as view:
        while size >= begin + 4:
            length = int.from_bytes(view[begin : begin + 4], "little")
            if not 0 < length <= MOST_BYTES + 1:
                raise ValueError(f"{length} is not the length of a message")
            end = begin + 4 + length
            if size < end:
                break
            messages.append(read_message(view[begin + 4 : end]))
            begin = end
    del received[:begin]
    return messages


def _with_length(kind: bytes, data: bytes) -> bytes:
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON are more than {MOST_BYTES}")
    return (len(data) + 1).to_bytes(4, "little") + kind + data


def _number(value: Any) -> float:
    """A number of another library, such as numpy, as Python's."""
    if not isinstance(value, Real):
        raise TypeError(f"a {type(value).__name__} is not a JSON value")
    return float(value)


def failure_of(error: BaseException, moved: bool = False, row: Any = None) -> Failure:
    kind = "infra" if isinstance(error, InfraError) else "data" if isinstance(error, DataError) else "other"
    if moved and kind == "other":
        kind = "moved"
    return Failure(kind, type(error).__name__, message_of(error), describe_error(error, row))


_QUICK = ord("o")
_ENCODER = json.JSONEncoder(default=_number)
