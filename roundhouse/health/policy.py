"""What a run does when an iteration has failed, after all retries of its stage. A pure function; the whole policy is this page.

    kind of failure     stop_on_error   stop_on_critical   continue
    infra               stop            wait, try again    wait, try again
    data                stop            skip               skip
    defect              stop            stop               skip
    fatal               stop            stop               stop

Invariant: a failed iteration is tried again, skipped on record, or ends the run; it is never passed over in silence, and no
policy goes on for ever. To skip means that the next version is the one before, byte for byte, published with the reason
(`roundhouse.stages.skip`), so that every later iteration, a restart and a fork find what they always find.

Too few rollouts or sequences left (`TooFewLeft`) is decided by `failures.on_too_few` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roundhouse.config.failures import FailuresConfig
from roundhouse.errors import TooFewLeft
from roundhouse.health.taxonomy import Kind, kind_of

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
    step = _step(error, kind, config)
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


def _step(error: BaseException, kind: Kind, config: FailuresConfig) -> Step:
    if isinstance(error, TooFewLeft) and config.on_too_few == "skip":
        return Step.SKIP
    if config.policy == "stop_on_error" or kind is Kind.FATAL:
        return Step.STOP
    if kind is Kind.INFRA:
        return Step.WAIT
    return Step.SKIP if kind is Kind.DATA or config.policy == "continue" else Step.STOP
