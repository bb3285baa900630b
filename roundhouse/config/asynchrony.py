"""Asynchrony: how far the policy that generates may lag behind the policy that trains.

Invariant: one number, `staleness`, bounds the age of every trained rollout in every mode. The age of a rollout that
iteration k trains on is (k - 1) - v, with v the oldest policy version that generated any of its tokens. A combination that
cannot hold the bound is refused here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from roundhouse.config.section import PositiveInt, Section

Mode = Literal["sync", "batch-async", "fully-async", "windowed"]
Refit = Literal["in-flight", "drain"]


class Asynchrony(Section):
    """How collecting and training overlap."""

    mode: Mode = "sync"
    """sync: an iteration's rollouts begin when every replica has the weights that it trains. batch-async: a replica begins a
    rollout unless it would be too old, and stops taking new ones while its weights are exchanged. fully-async: the same bound,
    but no rollout ever waits for weights; what begins during a transfer begins on the new ones. windowed: as batch-async, and a
    step trains on the oldest finished groups among the oldest `window`."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """The oldest age that is trained on, in policy versions. 0 is sync, whatever the mode."""
    window: PositiveInt = 1
    """windowed only: a step may choose among so many of the oldest groups. That costs age: `staleness` must be at least
    1 + ceil((window - 1) / groups of an iteration)."""
    refit: Refit = "in-flight"
    """in-flight: running generations are paused, resume with the new weights and record both versions. drain: a replica takes
    new weights only when its running rollouts have ended, so that a rollout has one version."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.mode == "sync" and self.staleness > 0:
            raise ValueError(
                f"staleness is {self.staleness}, but mode sync trains on nothing older than its own version. Set staleness to "
                "0, or mode to batch-async."
            )
        if self.window > 1 and self.mode != "windowed":
            raise ValueError(f"window is {self.window}, but mode is {self.mode}. Set mode to windowed, or window to 1.")
        if self.window > 1 and self.staleness < 2:
            raise ValueError(
                f"window is {self.window} and staleness {self.staleness}: a group that is passed over begins a version early "
                "and is trained another one late. Set staleness to 2 or more, or window to 1."
            )
        if self.mode == "fully-async" and self.refit == "drain":
            raise ValueError(
                "refit is drain, which holds new rollouts back until the running ones have ended, but mode fully-async never "
                "holds any back. Set refit to in-flight, or mode to batch-async."
            )
        return self

    def passed_over(self, groups: int) -> int:
        """How many steps of so many groups can pass over a group, at most; the proof is in `roundhouse.collection.bound`."""
        return -(-(self.window - 1) // groups)

    def start_lag(self, groups: int) -> int:
        """How many versions early a rollout may begin."""
        return self.staleness - self.passed_over(groups)

    def unfit_window(self, groups: int) -> str | None:
        """Why a window cannot be used with so many groups an iteration; None when it can."""
        late = self.passed_over(groups)
        if self.window == 1 or self.staleness > late:
            return None
        return (
            f"asynchrony.window is {self.window} with {groups} groups an iteration: a group can be passed over {late} times, "
            f"and to be overtaken at all it has to begin a version early, but asynchrony.staleness is {self.staleness}. Raise "
            f"it to {late + 1}, or set window to 1."
        )
