"""What a run does about failures, and how it notices that nothing moves (`docs/failures.md`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from roundhouse.config.section import PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig

SHORTEST_STALL_SECONDS = 900.0


class FailuresConfig(Section):
    """Policy, watchdog, heartbeat. Retries of single rollouts are in `rollout.retry`."""

    policy: Literal["stop_on_error", "stop_on_critical", "continue"] = "stop_on_error"
    """When an iteration has failed after the retries of its stage. `stop_on_error` ends the run. `stop_on_critical` waits for
    what may pass by itself, skips (on record) an iteration whose data failed, and ends the run for everything else. `continue`
    skips defects of the program too."""
    on_too_few: Literal["fail", "skip"] = "fail"
    """When too few rollouts or groups are left of an iteration: fail it, or skip it on record whatever `policy` says. To
    collect more tasks instead, set `rollout.dynamic_sampling`."""
    min_groups: PositiveInt = 1
    """Fewer groups than this with something to train on are too few."""
    max_consecutive_skips: Annotated[int, Field(ge=0)] = 3
    """More iterations in a row than this are not skipped; the run ends instead."""
    max_wait_seconds: Annotated[float, Field(ge=0)] = 3600
    """How long one iteration is waited for in all, while its infrastructure is away."""
    stall_seconds: PositiveFloat | None = None
    """A stage in which nothing moves for so long is given up and tried again. Unset: 900, or half as much again as the longest
    time limit in the configuration, where that is more."""
    heartbeat_seconds: PositiveFloat = 10
    """How often the run's process writes down what is in flight (`roundhouse runs status`)."""


def stall_seconds(config: RunConfig) -> float:
    """`failures.stall_seconds`, or what stands for it: longer than any wait that has a time limit of its own."""
    if config.failures.stall_seconds is not None:
        return config.failures.stall_seconds
    generation = config.generation
    limits = [
        config.rollout.timeout_seconds,
        generation.start_timeout_seconds + generation.refit_timeout_seconds,
        generation.request_timeout_seconds,
        getattr(config.train.service, "timeout_seconds", 0.0),
    ]
    return max(SHORTEST_STALL_SECONDS, 1.5 * max(limits))
