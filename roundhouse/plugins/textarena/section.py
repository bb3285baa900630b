"""The section of an environment that plays a game of TextArena."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from roundhouse.config.environments import EnvironmentSection
from roundhouse.config.section import PositiveInt, Target


class TextArenaSection(EnvironmentSection):
    """Several turns: a game of the package textarena, alone or against opponents that do not learn."""

    kind: Literal["textarena"]
    game: str
    """Id of a game, such as `GuessTheNumber-v0`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the game, such as `max_turns`."""
    players: PositiveInt = 1
    """Players of the game. The policy takes each seat in turn."""
    opponent: Target | None = None
    """`module:function` or `path/to/file.py:function` of (observation, `random.Random`), which returns the move of the other
    players. Unset: a random one of the moves that the newest observation shows in square brackets."""
    train: PositiveInt = 1000
    """Training games, each with a seed."""
    heldout: PositiveInt = 100
    """Number of held-out games; their seeds follow."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the first game."""

    @model_validator(mode="after")
    def _opponent(self) -> TextArenaSection:
        if self.opponent is not None and self.players == 1:
            raise ValueError(
                "environment.opponent is set, but environment.players is 1. Set players to 2 or more, or leave opponent out."
            )
        return self
