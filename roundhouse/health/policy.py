"""Kinds of failure, and a run's reaction to a failed iteration after all retries of its stage: a pure function.

    kind of failure     stop_on_error   stop_on_critical   continue
    infra               stop            wait, try again    wait, try again
    data                stop            skip               skip
    defect              stop            stop               skip
    fatal               stop            stop               stop

Invariant: a failed iteration is retried, skipped on record, or ends the run, never ignored; every policy ends. A
skipped iteration's version equals the previous one, byte for byte, with the reason (`roundhouse.stages.checkpoint`), so
later iterations, a restart and a fork need no special case. `failures.on_too_few` decides about too few rollouts or
sequences (`TooFewLeft`) first.

Every error has one kind, and a code under which it is counted:

    infra    machines, processes, networks: may pass by itself          retried with back-off, within budgets
    data     caused by the input: fails in the same way each time       not retried; the rollout or iteration is omitted
    fatal    configuration, a damaged store, an engine that cannot      not retried; a person has to act
             start: the next iteration would fail in the same way
    defect   an error without a Roundhouse type                         not retried; please report it

Invariant: errors are typed where they are raised. Errors of libraries that only a name or number identifies are typed
here (`typed`), at the boundary of a rollout, a stage or a process; no other code reads an error's text.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from roundhouse.config.operations import FailuresConfig
from roundhouse.errors import (
    DataError,
    DiskFull,
    InfraError,
    OutOfMemory,
    RoundhouseError,
    ServiceUnreachable,
    StoreError,
    TooFewLeft,
)
from roundhouse.health.errors import Severity

FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 600.0
ALMOST_FULL = 64 * 2**20
"""Free bytes of a disk below which it is named with an error that names no file."""
"""Waits double: an engine or a disk that a person has to mend takes minutes, not seconds."""


class Step(StrEnum):
    """The next step after a failure."""

    STOP = "stop"
    SKIP = "skip"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Course:
    """A decision, with its text for people."""

    step: Step
    reason: str
    seconds: float = 0.0
    """Time to wait before the iteration is retried."""


@dataclass(frozen=True, slots=True)
class Past:
    """Reactions to earlier failures."""

    skipped_in_a_row: int = 0
    """Number of skipped iterations directly before this one."""
    waits: int = 0
    """Number of waits for this iteration."""
    waited_seconds: float = 0.0


def after_failure(error: BaseException, config: FailuresConfig, past: Past) -> Course:
    """Decide about the error that ended an iteration."""
    kind = kind_of(error)
    if isinstance(error, TooFewLeft) and config.on_too_few == "skip":
        step = Step.SKIP
    elif config.policy == "stop_on_error" or kind is Kind.FATAL:
        step = Step.STOP
    elif kind is Kind.INFRA:
        step = Step.WAIT
    else:
        step = Step.SKIP if kind is Kind.DATA or config.policy == "continue" else Step.STOP
    if step is Step.SKIP and past.skipped_in_a_row >= config.max_consecutive_skips:
        return Course(
            Step.STOP,
            f"the {past.skipped_in_a_row} iterations before were skipped too (failures.max_consecutive_skips)",
        )
    if step is Step.WAIT:
        seconds = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**past.waits)
        if past.waited_seconds + seconds > config.max_wait_seconds:
            return Course(Step.STOP, f"waited {past.waited_seconds:.0f} s already (failures.max_wait_seconds)")
        return Course(Step.WAIT, f"a failure of kind {kind} may pass", seconds)
    return Course(step, f"failures.policy is {config.policy}, and the failure is of kind {kind}")


_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_OUT_OF_MEMORY = re.compile(r"out of memory|can(?:'t|not) allocate memory|can't start new thread", re.IGNORECASE)
_TRANSPORT = ("TransportError", "ClientConnectionError", "ConnectionError", "RayError", "BotoCoreError")
"""Base classes with which HTTP clients, Ray and S3 report an unreachable peer. By name, so that none is imported
here."""


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
    """Return an error's severity; `again`: the work is retried."""
    if again:
        return Severity.WARNING
    return Severity.ERROR if kind_of(error) in (Kind.INFRA, Kind.DATA) else Severity.CRITICAL


def typed(error: BaseException) -> BaseException:
    """Return the error as a typed one if its meaning is known, else unchanged.

    >>> typed(OSError(28, "No space left on device"))
    DiskFull('[Errno 28] No space left on device. Free space, then start the run again: it resumes.')
    """
    if isinstance(error, RoundhouseError):
        return error
    if isinstance(error, MemoryError) or (_is_runtime_error(error) and _OUT_OF_MEMORY.search(str(error))):
        failure: RoundhouseError = OutOfMemory(
            f"{type(error).__name__}: {str(error)[:500]}. Lower train.tokens_per_microbatch or set train.logits_chunk_tokens, "
            "give the machine more memory, or stop other programs on it."
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        failure = DiskFull(f"{error}{_full_disks(error)}. Free space, then start the run again: it resumes.")
    elif isinstance(error, OSError) and error.errno == errno.EROFS:
        failure = StoreError(
            f"{error}. Make the file system writable, or name another directory, then start the run again."
        )
    elif (
        isinstance(error, ConnectionError)
        or any(base.__name__ in _TRANSPORT for base in type(error).__mro__)
        or (_is_runtime_error(error) and str(error).startswith("Failed to reach API"))  # Prefect's client raises this
    ):
        failure = ServiceUnreachable(
            f"{type(error).__module__.split('.')[0]} {type(error).__name__}: {str(error)[:500]}. `roundhouse doctor` names "
            "the unreachable service."
        )
    else:
        return error
    failure.__cause__ = error
    return failure


def _full_disks(error: OSError) -> str:
    """Return the directories with hardly any space left, for an error that names no file."""
    if error.filename is not None:
        return ""
    places = {str(Path.cwd()), tempfile.gettempdir(), str(Path.home()), "/dev/shm"}
    full = [place for place in sorted(places) if Path(place).is_dir() and shutil.disk_usage(place).free < ALMOST_FULL]
    return f" (almost full: {', '.join(full)})" if full else ""


def _is_runtime_error(error: BaseException) -> bool:
    """torch raises `OutOfMemoryError` on a GPU and a bare RuntimeError on a CPU."""
    return isinstance(error, RuntimeError)
