"""What kind of failure an error is, and under which code it is counted.

    infra    machines, processes, networks: may pass by itself          retried with back-off, within budgets
    data     lies in the input: fails in the same way each time         not retried; the rollout or iteration is put aside
    fatal    configuration, a damaged store, an engine that cannot      not retried; a person has to act
             start: the next iteration would fail in the same way
    defect   an error that nobody typed                                 not retried; please report it

Invariant: errors are typed where they are raised. What libraries raise, and can only be told by its name or number, is typed
here (`typed`), at the border of a rollout, a stage or a process; nothing else looks into an error's text.
"""

from __future__ import annotations

import errno
import re
from enum import StrEnum

from roundhouse.errors import (
    DataError,
    DiskFull,
    InfraError,
    OutOfMemory,
    RoundhouseError,
    ServiceUnreachable,
)
from roundhouse.health.errors import Severity

_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
_TRANSPORT = ("TransportError", "ClientConnectionError", "ConnectionError", "RayError", "BotoCoreError")
"""Base classes by which HTTP clients, Ray and S3 say that the other side is away. By name, so that none is imported here."""


class Kind(StrEnum):
    """Decides about retries and about the run."""

    INFRA = "infra"
    DATA = "data"
    FATAL = "fatal"
    DEFECT = "defect"


def kind_of(error: BaseException) -> Kind:
    """The kind of an error, typed or not."""
    error = typed(error)
    if isinstance(error, InfraError):  # first: a full disk is an error of the store and one of the machine
        return Kind.INFRA
    if isinstance(error, DataError):
        return Kind.DATA
    return Kind.FATAL if isinstance(error, RoundhouseError) else Kind.DEFECT


def code_of(error: BaseException) -> str:
    """`tool_timeout` of a `ToolTimeout`: short, stable, and in the table of docs/failures.md."""
    error = typed(error)
    return code_of_type(type(error).__name__) if isinstance(error, RoundhouseError) else "unexpected_error"


def code_of_type(name: str) -> str:
    return _WORD.sub("_", name).lower()


def severity_of(error: BaseException, *, again: bool) -> Severity:
    """How bad it is; `again`: the work is tried again."""
    if again:
        return Severity.WARNING
    return Severity.ERROR if kind_of(error) in (Kind.INFRA, Kind.DATA) else Severity.CRITICAL


def typed(error: BaseException) -> BaseException:
    """The error as one of ours where it is known what it means, else as it is.

    >>> typed(OSError(28, "No space left on device"))
    DiskFull('[Errno 28] No space left on device. Free space, then start the run again: it goes on where it stopped.')
    """
    if isinstance(error, RoundhouseError):
        return error
    found = _typed(error)
    if found is None:
        return error
    found.__cause__ = error
    return found


def _typed(error: BaseException) -> RoundhouseError | None:
    if isinstance(error, MemoryError) or (_is_runtime_error(error) and _OUT_OF_MEMORY.search(str(error))):
        return OutOfMemory(
            f"{type(error).__name__}: {str(error)[:500]}. Lower train.tokens_per_microbatch or set train.logits_chunk_tokens, "
            "or give the machine more memory; see that nothing else fills it."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{error}. Free space, then start the run again: it goes on where it stopped.")
    if isinstance(error, ConnectionError) or _is_transport(error):
        return ServiceUnreachable(
            f"{type(error).__module__.split('.')[0]} {type(error).__name__}: {str(error)[:500]}. `roundhouse doctor` says what "
            "is not reachable."
        )
    return None


def _is_transport(error: BaseException) -> bool:
    """Prefect's client says it with a bare RuntimeError."""
    by_name = any(base.__name__ in _TRANSPORT for base in type(error).__mro__)
    return by_name or (_is_runtime_error(error) and str(error).startswith("Failed to reach API"))


def _is_runtime_error(error: BaseException) -> bool:
    """torch says it with `OutOfMemoryError` on a GPU and a bare RuntimeError on a CPU."""
    return isinstance(error, RuntimeError)
