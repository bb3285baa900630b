"""Which tasks an iteration draws: in epochs, or by how difficult they were recently.

Invariant: what a curriculum draws depends on the store alone, on the iterations that the oldest policy version which may roll
out the tasks was trained on (`roundhouse.rollout.curriculum`). So a run that resumes draws what it would have drawn.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from roundhouse.config.secrets import Parameters
from roundhouse.config.section import PositiveFloat, PositiveInt, Section, Target


class Epochs(Section):
    """Pass after pass over all tasks, whatever their rewards."""

    kind: Literal["epochs"] = "epochs"


class Recent(Section):
    """What all kinds share that look at recent rewards."""

    window: PositiveInt = 50
    """Iterations that count, of those whose rollouts the policy was trained on. A task whose last group is older counts as
    unseen again; so many iterations should draw as many groups as there are tasks."""


class SuccessBand(Recent):
    """Prefer tasks whose recent success rate lies in a band: the others' groups hardly have spread, and teach little."""

    kind: Literal["success_band"]
    band: tuple[float, float] = (0.2, 0.8)
    """Lowest and highest rate of a task with weight 1, both included."""
    pass_threshold: float | None = None
    """A rollout with at least this reward passes, and a task's rate is the share that passed. Unset: its rate is the mean
    reward."""
    falloff: PositiveFloat = 0.2
    """Distance from the band at which a task's weight, which falls in a line, has come down to `outside_weight`."""
    outside_weight: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Of tasks that are far outside. Above 0, so that each comes up again: the policy changes."""
    unseen_weight: PositiveFloat = 1.0
    """Of tasks without a recent rate. Above 1, they are tried before others are repeated."""

    @model_validator(mode="after")
    def _rates(self) -> Self:
        low, high = self.band
        if low >= high:
            raise ValueError(
                f"band is [{low}, {high}], which holds no rate. Give the lower bound first, as in [0.2, 0.8]."
            )
        if self.pass_threshold is not None and not (low >= 0 and high <= 1):
            raise ValueError(
                f"band is [{low}, {high}], but with pass_threshold ({self.pass_threshold}) a rate is a share, from 0 to 1. "
                "Set band within that, or leave pass_threshold out to hold the mean reward against it."
            )
        return self


class CustomCurriculum(Recent):
    """A curriculum of your own, imported by name."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` or `path/to/file.py:Class` of a `Curriculum` (roundhouse.rollout.curriculum), made with `parameters`."""
    parameters: Parameters = Field(default_factory=dict)
    """Keyword arguments of the class."""


CurriculumConfig = Annotated[Epochs | SuccessBand | CustomCurriculum, Field(discriminator="kind")]
