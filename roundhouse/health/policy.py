"""Kinds of failure, and what a run does when an iteration has failed, after all retries of its stage: a pure function.

    kind of failure     stop_on_error   stop_on_critical   continue
    infra               stop            wait, try again    wait, try again
    data                stop            skip               skip
    defect              stop            stop               skip
    fatal               stop            stop               stop

Invariant: a failed iteration is tried again, skipped on record, or ends the run; it is never passed over in silence, and no
policy goes on for ever. To skip means that the next version is the one before, byte for byte, published with the reason
(`roundhouse.stages.checkpoint`), so that every later iteration, a restart and a fork find what they always find.

Too few rollouts or sequences left (`TooFewLeft`) is decided by `failures.on_too_few` first.

Every error has one kind, and a code under which it is counted:

    infra    machines, processes, networks: may pass by itself          retried with back-off, within budgets
    data     caused by the input: fails in the same way each time       not retried; the rollout or iteration is put aside
    fatal    configuration, a damaged store, an engine that cannot      not retried; a person has to act
             start: the next iteration would fail in the same way
    defect   an error without a type of ours                            not retried; please report it

Invariant: errors are typed where they are raised. What libraries raise, and can only be told by its name or number, is typed
here (`typed`), at the border of a rollout, a stage or a process; nothing else looks into an error's text.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from enum import StrEnum

from roundhouse.config.operations import FailuresConfig
from roundhouse.errors import (
    DataError,
    DiskFull,
    InfraError,
    OutOfMemory,
    RoundhouseError,
    ServiceUnreachable,
    TooFewLeft,
)
from roundhouse.health.errors import Severity

FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 600.0
"""Waits double: an engine or a disk that a person has to mend takes minutes, not seconds."""


class Step(StrEnum):
    """What comes next."""

    STOP = "stop"
    SKIP = "skip"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Course:
    """A decision, with what a person reads about it."""

    step: Step
    reason: str
    seconds: float = 0.0
    """How long to wait before the iteration is tried again."""


@dataclass(frozen=True, slots=True)
class Past:
    """What was done about failures before this one."""

    skipped_in_a_row: int = 0
    """Iterations right before this one that were skipped."""
    waits: int = 0
    """How often this iteration was waited for."""
    waited_seconds: float = 0.0


def after_failure(error: BaseException, config: FailuresConfig, past: Past) -> Course:
    """What to do about the error that an iteration ended with."""
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
    if isinstance(error, MemoryError) or (_is_runtime_error(error) and _OUT_OF_MEMORY.search(str(error))):
        found: RoundhouseError = OutOfMemory(
            f"{type(error).__name__}: {str(error)[:500]}. Lower train.tokens_per_microbatch or set train.logits_chunk_tokens, "
            "or give the machine more memory; see that nothing else fills it."
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = DiskFull(f"{error}. Free space, then start the run again: it goes on where it stopped.")
    elif (
        isinstance(error, ConnectionError)
        or any(base.__name__ in _TRANSPORT for base in type(error).__mro__)
        or (_is_runtime_error(error) and str(error).startswith("Failed to reach API"))  # how Prefect's client says it
    ):
        found = ServiceUnreachable(
            f"{type(error).__module__.split('.')[0]} {type(error).__name__}: {str(error)[:500]}. `roundhouse doctor` says what "
            "is not reachable."
        )
    else:
        return error
    found.__cause__ = error
    return found


def _is_runtime_error(error: BaseException) -> bool:
    """torch says it with `OutOfMemoryError` on a GPU and a bare RuntimeError on a CPU."""
    return isinstance(error, RuntimeError)
