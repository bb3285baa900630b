"""The section of an environment that is made by reasoning-gym."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from roundhouse.config.environments import EnvironmentSection
from roundhouse.config.section import PositiveFloat, PositiveInt, Section


class ReasoningGymPart(Section):
    """One data set of several."""

    weight: PositiveFloat = 1.0
    """How often its problems are drawn, relative to the other data sets."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keys of its own configuration, such as `min_terms`."""
    level: Annotated[int, Field(ge=0)] | None = None
    """Level of its own curriculum, for the keys that `options` leaves out. Unset: its defaults."""


class ReasoningGymSection(EnvironmentSection):
    """Single turn: problems that the package reasoning-gym generates and judges."""

    kind: Literal["reasoning_gym"]
    dataset: str | None = None
    """Name of a data set, such as `chain_sum`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keys of its own configuration, such as `min_terms`."""
    level: Annotated[int, Field(ge=0)] | None = None
    """Level of its own curriculum, for the keys that `options` leaves out. Unset: its defaults."""
    datasets: dict[str, ReasoningGymPart] = Field(default_factory=dict)
    """Several data sets by name instead of one, in one composite of reasoning-gym."""
    train: PositiveInt = 1000
    """Training problems that are generated. One that is a held-out problem too is left out."""
    heldout: PositiveInt = 100
    """Held-out problems."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the generator; the training problems are the first, the held-out ones follow."""
    prompt: str | None = "default"
    """System prompt of reasoning-gym by its name, such as `default` or `direct`. Null: the question alone."""
    answer: Literal["tag", "text"] = "tag"
    """What is judged: the text in the last `<answer>` of the reply, or the whole reply."""

    @model_validator(mode="after")
    def _one_source(self) -> ReasoningGymSection:
        if (self.dataset is None) == (not self.datasets):
            problem = "both" if self.datasets else "neither"
            raise ValueError(f"environment has {problem} of dataset and datasets. Set one of them.")
        if self.datasets and (self.options or self.level is not None):
            raise ValueError(
                "environment.options and environment.level belong to environment.dataset. Set those of each data set under "
                "environment.datasets.NAME."
            )
        return self
