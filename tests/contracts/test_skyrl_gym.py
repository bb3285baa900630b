"""skyrl-gym's own package: the same replies earn the same rewards in four of its environments."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.environments import load_any
from roundhouse.errors import ConfigError, DataError

pytestmark = [pytest.mark.contract("skyrl-gym-0.4.0"), pytest.mark.timeout(600)]
PEER = Path(__file__).parent / "skyrl_gym_peer.py"
REWRITES = """
from skyrl_gym.envs.base_text_env import BaseTextEnv

class Rewrites(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()

    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}, "postprocessed_action": action.upper()}
"""


@pytest.fixture(autouse=True)
def package(foreign_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable in this process, after all installed packages."""
    [site] = (foreign_python.parent.parent / "lib").glob("python3.*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])


def made(file: Path, rows: list[dict[str, Any]], **keys: Any) -> Any:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {"kind": "skyrl_gym", "data": str(file), "heldout": 0, **keys}
    return load_any(parse_config({"run_id": "r", "environment": tree}).environment)


def reply(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"output": [{"type": "message", "role": "assistant", "content": content}]}


def row(kind: str, number: int, **fields: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Answer."}, {"role": "user", "content": f"{kind}, question {number}"}]
    return {"data_source": kind, "prompt": prompt, "env_class": kind, **fields}


def cases_of(databases: Path) -> list[dict[str, Any]]:
    """Return episodes of four environments with right, wrong and malformed replies."""
    folder = databases / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.executescript(
            "create table goods (name text, price int); insert into goods values ('tea', 3), ('ink', 5)"
        )
    generator, cases = random.Random(3), []
    for number in range(12):
        answers = [
            f"#### {number}",
            f"#### {number + 1}",
            "I do not know",
            f"It is \\boxed{{{number}}}. Answer: {number}",
        ]
        replies = [generator.choice(answers) for _ in range(5)]
        truth = {"method": "rule", "ground_truth": str(number)}
        query = generator.choice(["select name from goods", "select price from goods", "selec"])
        ask = f"<think>a</think><sql>{query}</sql>"
        end = f"<think>b</think><solution>{generator.choice([query, 'select name from goods'])}</solution>"
        sql = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "select name from goods"}}
        cases += [
            {"row": row("gsm8k", number, reward_spec=truth), "config": {}, "replies": replies},
            {"row": row("gsm8k_multi_turn", number, reward_spec=truth, max_turns=3), "config": {}, "replies": replies},
            {"row": row("aime", number, reward_model=truth), "config": {}, "replies": replies},
            {"row": row("text2sql", number, **sql), "config": {"db_path": str(databases)}, "replies": [ask, ask, end]},
        ]
    return cases


def played(python: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """Return the steps that the package itself plays."""
    command = [str(python), str(PEER), json.dumps(cases)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


async def test_the_same_replies_earn_what_the_package_gives(foreign_python: Path, tmp_path: Path) -> None:
    cases = cases_of(tmp_path)
    theirs = played(foreign_python, cases)
    rewards: dict[str, set[float]] = {}
    for case, steps in zip(cases, theirs, strict=True):
        environment = made(tmp_path / "rows.jsonl", [case["row"]], env_config=case["config"])
        [task] = environment.tasks("train")
        assert task["responses_create_params"]["input"] == case["row"]["prompt"]
        state, _ = await environment.reset(task)
        for text, expected in zip(case["replies"], steps, strict=False):
            step = await environment.step(state, reply(text))
            assert [step.reward, step.terminated] == expected, case
            assert (step.observation is None) == step.terminated
            rewards.setdefault(case["row"]["env_class"], set()).add(step.reward)
        assert step.terminated
        await environment.close(state)
    assert {name: len(values) > 1 for name, values in rewards.items()} == dict.fromkeys(rewards, True)
    assert len(rewards) == 4


async def test_an_environment_that_rewrites_replies_fails_the_rollout(tmp_path: Path) -> None:
    (tmp_path / "rewrites.py").write_text(REWRITES)
    environment = made(tmp_path / "rows.jsonl", [row("any", 1)], env=f"{tmp_path}/rewrites.py:Rewrites")
    state, _ = await environment.reset(environment.tasks("train")[0])
    with pytest.raises(DataError, match="Rewrites rewrites a reply"):
        await environment.step(state, reply("a"))
    assert (await environment.step(state, reply("A"))).reward == 1.0


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "environment.data has rows whose env_class is gsm9k; skyrl-gym has aime, gsm8k"),
        ({"env": "gsm9k"}, "environment.env is 'gsm9k'; skyrl-gym has aime, gsm8k"),
    ],
)
def test_an_unknown_environment_is_refused_with_the_known_ones(keys: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        made(tmp_path / "rows.jsonl", [row("gsm9k", 1)], **keys).tasks("train")
    assert text in str(error.value)
