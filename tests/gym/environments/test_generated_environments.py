"""Properties of all environments with a generator."""

import json
import random
from typing import Any

import pytest

from roundhouse import plugins
from roundhouse.environments import load, made_once
from roundhouse.environments.base import Toolbox
from roundhouse.environments.calculator import ArithmeticChain
from roundhouse.environments.generated import GeneratedEnvironment
from roundhouse.errors import ConfigError
from tests.gym.environments.playing import SPLITS, prompt_of, rewards_of
from tests.gym.kinds import CONFIG

TREES: list[dict[str, Any]] = [
    {"kind": "arithmetic_chain", "problems": 300},
    {"kind": "arithmetic_chain", "problems": 100, "operators": 6},
    {"kind": "lookup", "problems": 300},
    {"kind": "countdown", "problems": 300},
    {"kind": "sudoku", "problems": 300},
    {"kind": "warehouse", "problems": 300},
    {"kind": "warehouse", "problems": 100, "orders": 4},
    {"kind": "sql_world", "problems": 200},
    {"kind": "code", "problems": 100},
    {"kind": "terminal", "problems": 100},
    {"kind": "bug_fix", "problems": 100},
]
CONFIGS = [CONFIG.validate_python(each) for each in TREES if each["kind"] in plugins.names("environment")]


def some(environment: GeneratedEnvironment) -> int:
    """Return the number of problems to play: each answer of `code` and each sandbox is a process."""
    return 10 if environment.name in ("code", "terminal", "bug_fix") else 40


@pytest.fixture(
    params=[pytest.param(each, id=each.kind, marks=[pytest.mark.real] * hasattr(each, "sandbox")) for each in CONFIGS]
)
def environment(request) -> GeneratedEnvironment:
    return load(request.param)


async def test_every_right_demonstration_is_rewarded_fully_through_the_real_tools(environment) -> None:
    rewards = await rewards_of(environment, right=True, count=some(environment))
    assert len(rewards) >= 0.8 * some(environment)
    assert set(rewards) == {1.0}


async def test_no_wrong_demonstration_is_rewarded_fully(environment) -> None:
    assert max(await rewards_of(environment, right=False, count=some(environment))) < 1.0


def test_splits_are_disjoint_in_ids_and_problems_and_both_are_there(environment) -> None:
    ids = [[row["task_id"] for row in environment.tasks(split)] for split in SPLITS]
    assert len({*ids[0], *ids[1]}) == len(ids[0]) + len(ids[1])
    assert 0.1 < len(ids[1]) / len(ids[0] + ids[1]) < 0.3


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_the_same_rows_are_generated_every_time(config) -> None:
    """With an emptied cache and another state of the shared random numbers."""
    generated = []
    for seed in range(2):
        made_once.cache_clear()
        random.seed(seed)
        generated.append(json.dumps([list(load(config).tasks(split)) for split in SPLITS]))
    assert generated[0] == generated[1]


async def test_two_rollouts_of_a_task_never_share_state(environment) -> None:
    row = environment.tasks("train")[0]
    first, second = await environment.seed_session(row), await environment.seed_session(row)
    assert first is None or first is not second
    before = repr(second)
    for name, tool in environment.tools().items():
        arguments = {key: _anything(value["type"]) for key, value in tool.parameters["properties"].items()}
        await Toolbox(environment).call(first, name, arguments)
    assert repr(second) == before
    await environment.close_session(first)
    await environment.close_session(second)


def test_demonstrations_are_of_the_split_in_the_share_asked_for(environment) -> None:
    shown = environment.demonstrations("train", 60, 0.5, seed=2)
    assert {conversation[0]["content"] for conversation in shown} <= {
        prompt_of(row) for row in environment.tasks("train")
    }
    assert shown == environment.demonstrations("train", 60, 0.5, seed=2)


def test_more_problems_than_there_are_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match="problems is 100000"):
        ArithmeticChain(operators=1, problems=100_000)


def _anything(json_type: str) -> object:
    return {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "object": {}, "array": []}[json_type]
