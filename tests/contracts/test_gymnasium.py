"""Gymnasium's own package: the same actions of the same seed earn the same rewards, by name and by number."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.environments import load_any
from roundhouse.errors import ConfigError

pytestmark = [pytest.mark.contract("gymnasium-1.4.0"), pytest.mark.timeout(600)]
PEER = Path(__file__).parent / "gymnasium_peer.py"
LAKE = ("left", "down", "right", "up")
GAMES: dict[str, dict[str, Any]] = {
    "FrozenLake-v1": {"options": {"is_slippery": True}, "actions": LAKE, "observation": "render"},
    "CliffWalking-v1": {"actions": ("up", "right", "down", "left")},
    "Taxi-v4": {"observation": "render"},
    "Blackjack-v1": {"actions": ("stick", "hit")},
    "CartPole-v1": {},
}
SEEDS = 6


@pytest.fixture(autouse=True)
def package(foreign_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable in this process, after all installed packages."""
    [site] = (foreign_python.parent.parent / "lib").glob("python3.*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])


def made(id: str, **keys: Any) -> Any:
    tree = {"kind": "gymnasium", "id": id, "train": SEEDS, "heldout": 1, **keys}
    return load_any(parse_config({"run_id": "r", "environment": tree}).environment)


def reply(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"output": [{"type": "message", "role": "assistant", "content": content}]}


def played(python: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """Return the steps that the package itself plays."""
    command = [str(python), str(PEER), json.dumps(cases)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


async def test_the_same_actions_earn_what_the_package_gives(foreign_python: Path) -> None:
    environments = {id: made(id, **keys) for id, keys in GAMES.items()}
    cases = []
    for id, keys in GAMES.items():
        count = {"Taxi-v4": 6, "CartPole-v1": 2}.get(id) or len(keys["actions"])
        for seed in range(SEEDS):
            drawn = random.Random(seed)
            moves = [drawn.randrange(count) for _ in range(40)]
            cases.append({"id": id, "options": keys.get("options", {}), "seed": seed, "actions": moves})
    theirs = played(foreign_python, cases)
    ended, rewards = 0, set()
    for case, steps in zip(cases, theirs, strict=True):
        environment, names = environments[case["id"]], GAMES[case["id"]].get("actions")
        state, _ = await environment.reset(environment.tasks("train")[case["seed"]])
        for number, expected in zip(case["actions"], steps, strict=False):
            step = await environment.step(state, reply(f"Not 99: {names[number] if names else number}."))
            assert [step.reward, step.terminated, step.truncated] == expected, case
            assert (step.observation is None) == step.done
            rewards.add(step.reward)
        ended += step.done
        await environment.close(state)
    assert ended >= SEEDS
    assert len(rewards) >= 4


async def test_the_position_is_marked_and_an_invalid_action_is_no_step() -> None:
    environment = made("FrozenLake-v1", options={"is_slippery": False}, actions=LAKE, observation="render")
    [task, *_] = environment.tasks("train")
    assert "left, down, right, up" in task["responses_create_params"]["input"][0]["content"]
    state, first = await environment.reset(task)
    assert "[S]FFF" in first
    refused = await environment.step(state, reply("I jump."))
    assert (refused.observation, refused.metrics) == (
        "Invalid action: name one of left, down, right, up",
        {"invalid_action": 1.0},
    )
    assert "S[F]FF" in (await environment.step(state, reply("Left? No: right."))).observation
    taxi = made("Taxi-v4")
    state, observation = await taxi.reset(taxi.tasks("train")[0])
    assert observation.isdigit()
    assert "choose from Discrete(6)" in (await taxi.step(state, reply("9"))).observation


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"id": "FrozenLack-v1"}, "environment.id 'FrozenLack-v1'"),
        (
            {"id": "Taxi-v4", "actions": ("a", "b")},
            "environment.actions has 2 names, but the actions of Taxi-v4 are Discrete(6)",
        ),
        ({"id": "Taxi-v4", "options": {"size": 3}}, "with environment.options {'size': 3} cannot be made"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(**keys)
    assert text in str(error.value)
