"""The environment: one game for each seed, played by the rules and rewards of TextArena.

Invariant: the return of an episode is the reward that TextArena gives to the policy's seat. A game is a function of its seed
and its moves, independent of other games: TextArena draws from the process's generator `random`, so each call of a game
restores the generator's state of that game.

A message of the game is shown to the policy once, since its conversation holds the earlier ones. An episode without an end (a
limit of turns of the run) has the reward 0.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from roundhouse.environments.base import GymnasiumEnvironment, GymStep, Split, TaskRow, final_text
from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import kind_package, load_function

VERSION = "0.7."
"""Versions with the interface that this module uses."""
PROMPT = "You play a game. Answer with your next move in square brackets, as its rules show."
Opponent = Callable[[str, random.Random], str]


@dataclass(slots=True)
class TextArenaGame:
    """One episode."""

    env: Any
    seat: int
    opponents: random.Random
    generator: Any
    """State of `random` between two calls."""
    seen: dict[int, str] = field(default_factory=dict)
    """All messages to each opponent."""


class TextArena(GymnasiumEnvironment):
    """Games of one id."""

    name = "textarena"
    restoration = "replay"

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        players: int = 1,
        opponent: str | None = None,
        train: int = 1000,
        heldout: int = 100,
        seed: int = 0,
    ) -> None:
        """
        Raises:
            ConfigError: the package is missing or of another version, or the game cannot be made, or needs other players.
        """
        self._arena = kind_package("textarena", VERSION)
        self._seeds: dict[Split, range] = {
            "train": range(seed, seed + train),
            "heldout": range(seed + train, seed + train + heldout),
        }
        self._players = players
        self._opponent: Opponent = _random_move if opponent is None else load_function(opponent, "environment.opponent")
        self._game = _made(self._arena, game, options or {})
        try:
            self._started(seed, 0)
        except (AssertionError, ValueError) as error:
            raise ConfigError(
                f"environment.players is {players}, which {game} of TextArena refuses: {error}"
            ) from error

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        system = {"role": "system", "content": PROMPT}
        return [
            {
                "task_id": str(seed),
                "responses_create_params": {"input": [system]},
                "seed": seed,
                "seat": seed % self._players,
            }
            for seed in self._seeds[split]
        ]

    async def reset(self, row: TaskRow) -> tuple[TextArenaGame, str | None]:
        game = self._started(int(row["seed"]), int(row["seat"]))
        with _own_random(game):
            observation, has_ended = self._to_policy(game, False)
        if has_ended:
            raise DataError(
                f"The game of seed {row['seed']} ends before the policy's first turn. Choose another opponent or seed."
            )
        return game, observation

    async def step(self, state: TextArenaGame, response: dict[str, Any]) -> GymStep:
        with _own_random(state):
            has_ended, _ = state.env.step(action=final_text(response))
            observation, has_ended = self._to_policy(state, has_ended)
            if not has_ended:
                return GymStep(observation)
            rewards, info = state.env.close()
        own = info[state.seat]
        return GymStep(
            None,
            float((rewards or {}).get(state.seat, 0.0)),
            terminated=True,
            metrics={"invalid_move": float(own.get("invalid_move", False)), "turns": float(own.get("turn_count", 0))},
            info={"reason": str(own.get("reason", ""))},
        )

    def _started(self, seed: int, seat: int) -> TextArenaGame:
        game = TextArenaGame(copy.deepcopy(self._game), seat, random.Random(seed), random.getstate())
        with _own_random(game):
            game.env.reset(num_players=self._players, seed=seed)
        return game

    def _to_policy(self, game: TextArenaGame, done: bool) -> tuple[str | None, bool]:
        """Let the other players move until the policy's turn. Return its new messages, and whether the game has ended."""
        while not done:
            player, messages = game.env.get_observation()
            text = "\n".join(message for sender, message, kind in messages if not self._is_own(kind, sender, player))
            if player == game.seat:
                return text, False
            game.seen[player] = f"{game.seen.get(player, '')}\n{text}"
            done, _ = game.env.step(action=self._opponent(game.seen[player], game.opponents))
        return None, True

    def _is_own(self, kind: Any, sender: int, player: int) -> bool:
        return sender == player and kind == self._arena.ObservationType.PLAYER_ACTION


@contextmanager
def _own_random(game: TextArenaGame) -> Iterator[None]:
    outer = random.getstate()
    random.setstate(game.generator)
    try:
        yield
    finally:
        game.generator = random.getstate()
        random.setstate(outer)


def _random_move(observation: str, generator: random.Random) -> str:
    """Return one of the last line's moves in brackets that has some."""
    for line in reversed(observation.splitlines()):
        if moves := re.findall(r"\[[^\[\]]+\]", line):
            return generator.choice(moves)
    raise DataError(
        f"The observation shows no move in square brackets, so that a random opponent cannot move: {observation[-300:]!r}. Set "
        "environment.opponent to your function."
    )


def _made(arena: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Make a game without the wrappers that repeat earlier messages; the wrappers that read a move stay."""
    registry = arena.envs.registration.ENV_REGISTRY
    if f"{name}-raw" not in registry:
        import difflib

        known = sorted(each.removesuffix("-raw") for each in registry if each.endswith("-raw"))
        near = ", ".join(difflib.get_close_matches(name, known, n=3)) or ", ".join(known[:5])
        raise ConfigError(f"environment.game is {name!r}; TextArena has {len(known)} games, such as {near}.")
    try:
        env = arena.make(f"{name}-raw", **options)
    except LookupError as error:
        missing = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"environment.game is {name}, which needs data that is not on this machine ({missing}): python -m nltk.downloader "
            "words averaged_perceptron_tagger_eng"
        ) from error
    except TypeError as error:
        raise ConfigError(f"environment.options {dict(options)!r} do not fit {name} of TextArena: {error}.") from error
    for wrapper in registry[name].default_wrappers or ():
        if issubclass(wrapper, arena.ActionWrapper):
            env = wrapper(env)
    return env
