"""TextArena's own package: the same moves of the same seed earn the same rewards, whatever other games run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.environments import load_any
from roundhouse.errors import ConfigError, DataError

pytestmark = [pytest.mark.contract("textarena-0.7.4"), pytest.mark.timeout(600)]
PEER = Path(__file__).parent / "textarena_peer.py"
SEEDS = 6
OPPONENT = """
import json, pathlib

def play(observation, generator):
    file = pathlib.Path(__file__).with_name("moves.json")
    moves = json.loads(file.read_text())
    file.write_text(json.dumps(moves[1:]))
    return moves[0]
"""
"""Plays recorded moves."""


@pytest.fixture(autouse=True)
def package(foreign_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable in this process, after all installed packages."""
    [site] = (foreign_python.parent.parent / "lib").glob("python3.*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    return {}


@pytest.fixture
def games(foreign_python: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    """Games of the package by itself, played once for the module."""
    if not theirs:
        command = [str(foreign_python), str(PEER), str(SEEDS)]
        theirs |= json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return theirs


def made(**keys: Any) -> Any:
    return load_any(parse_config({"run_id": "r", "environment": {"kind": "textarena", **keys}}).environment)


def reply(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"output": [{"type": "message", "role": "assistant", "content": content}]}


async def test_games_for_one_player_that_run_together_earn_what_the_package_gives(games: dict[str, Any]) -> None:
    finished = 0
    for name, game in games.items():
        if game["players"] > 1:
            continue
        environment = made(game=name, train=SEEDS, heldout=1)
        states = [(await environment.reset(row))[0] for row in environment.tasks("train")]
        ends: list[Any] = [None] * SEEDS
        for turn in range(max(len(each["moves"]) for each in game["games"])):
            for seed, each in enumerate(game["games"]):
                if turn < len(each["moves"]):
                    ends[seed] = await environment.step(states[seed], reply(each["moves"][turn][1]))
        for each, end in zip(game["games"], ends, strict=True):
            assert end.terminated == each["done"], name
            assert end.reward == each["rewards"].get("0", 0.0), name
            finished += each["done"]
    assert finished >= 2 * SEEDS


async def test_the_seat_of_the_policy_earns_its_reward_against_an_opponent(
    games: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "opponent.py").write_text(OPPONENT)
    played = 0
    for name, game in games.items():
        if game["players"] == 1:
            continue
        environment = made(game=name, players=2, opponent=f"{tmp_path}/opponent.py:play", train=SEEDS, heldout=1)
        for row, each in zip(environment.tasks("train"), game["games"], strict=True):
            seat = row["seat"]
            (tmp_path / "moves.json").write_text(json.dumps([move for player, move in each["moves"] if player != seat]))
            own = [move for player, move in each["moves"] if player == seat]
            if not own:  # the other player lost by invalid moves
                with pytest.raises(DataError, match="ends before the policy's first turn"):
                    await environment.reset(row)
                continue
            state, _ = await environment.reset(row)
            for move in own:
                end = await environment.step(state, reply(move))
            assert (end.terminated, end.reward) == (each["done"], each["rewards"].get(str(seat), 0.0)), (name, seat)
            played += 1
    assert played >= SEEDS


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"game": "TicTacTo-v0"}, "environment.game is 'TicTacTo-v0'; TextArena has"),
        ({"game": "TicTacToe-v0"}, "environment.players is 1, which TicTacToe-v0 of TextArena refuses"),
        ({"game": "TicTacToe-v0", "players": 2, "options": {"a": 1}}, "do not fit TicTacToe-v0 of TextArena"),
        (
            {"game": "GuessTheNumber-v0", "opponent": "a.py:f"},
            "environment.opponent is set, but environment.players is 1",
        ),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_with_the_remedy(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(**keys)
    assert text in str(error.value)
