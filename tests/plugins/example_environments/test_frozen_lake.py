import json
import random

import pytest
from pydantic import ValidationError

from roundhouse.config.environments import CustomEnvironment
from roundhouse.environments import load, load_any
from roundhouse.errors import ConfigError
from roundhouse.plugins.example_environments.frozen_lake import MOVES, FrozenLake, find, way_to_goal
from roundhouse.plugins.example_environments.section import FrozenLakeEnvironment
from tests.gym.environments.playing import SPLITS, message, prompt_of

LAKE = FrozenLake(problems=60)
ROW = {"lake": [".#..", "...#", ".#.G", "...."], "start": [0, 0]}
WAY = ["down", "right", "right", "down", "right"]


async def play(row, *moves: str):
    state, _ = await LAKE.reset(row)
    return [await LAKE.step(state, {"output": [message(move)]}) for move in moves]


async def test_reaching_the_goal_ends_the_episode_with_one() -> None:
    steps = await play(ROW, *WAY)
    assert [step.reward for step in steps] == [0, 0, 0, 0, 1]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert steps[0].observation == ".#..\nP..#\n.#.G\n...."


async def test_a_hole_ends_the_episode_with_nothing() -> None:
    (step,) = await play(ROW, "right")
    assert (step.reward, step.terminated, step.truncated, step.metrics["fell_in"]) == (0.0, True, False, 1.0)


async def test_what_is_no_move_is_told_and_costs_a_step_and_the_border_holds() -> None:
    steps = await play(ROW, "jump", " UP ", "left")
    assert steps[0].observation == "Answer up, down, left or right."
    assert steps[2].observation == "P#..\n...#\n.#.G\n...."
    assert steps[2].metrics["steps_left"] == 7


async def test_the_last_step_truncates() -> None:
    steps = await play(ROW, *["up"] * 10)
    assert [step.truncated for step in steps] == [False] * 9 + [True]


async def test_every_lake_can_be_crossed_by_its_shortest_way_and_right_demonstrations_do() -> None:
    rows = {row["task_id"]: row for split in SPLITS for row in LAKE.tasks(split)}
    assert len(rows) == 60
    for row in map(json.loads, map(json.dumps, rows.values())):
        way = way_to_goal(row["lake"], tuple(row["start"]))
        assert way is not None
        assert len(way) >= 3
        assert (await play(row, *way))[-1].reward == 1.0


async def test_demonstrations_show_what_the_world_really_answers() -> None:
    lakes = {"\n".join(lines): lines for lines in LAKE.problems["train"]}
    for right in (1.0, 0.0):
        for shown in LAKE.demonstrations("train", 20, right, seed=3):
            lines = lakes[shown[1]["content"]]
            row = {"lake": [line.replace("P", ".") for line in lines], "start": find(lines, "P")}
            moves = [said["content"] for said in shown if said["role"] == "assistant"]
            steps = await play(row, *moves)
            assert [step.observation for step in steps[:-1]] == [said["content"] for said in shown[3::2]][
                : len(steps) - 1
            ]
            assert steps[-1].done
            assert right == 0.0 or steps[-1].reward == 1.0


async def test_two_episodes_never_share_state() -> None:
    first, second = (await LAKE.reset(ROW))[0], (await LAKE.reset(ROW))[0]
    await LAKE.step(first, {"output": [message("down")]})
    assert (first.place, second.place) == ((1, 0), (0, 0))
    assert "P" not in "".join(ROW["lake"])


def test_splits_share_no_lake() -> None:
    ids = [{row["task_id"] for row in LAKE.tasks(split)} for split in SPLITS]
    assert not ids[0] & ids[1]
    assert prompt_of(LAKE.tasks("train")[0]).startswith("Cross the lake")


def test_a_gymnasium_environment_loads_as_built_in_and_as_custom_and_is_refused_where_tools_are_needed() -> None:
    built_in = FrozenLakeEnvironment(kind="frozen_lake", problems=50, size=3, holes=2)
    target = "roundhouse.plugins.example_environments.frozen_lake:FrozenLake"
    custom = CustomEnvironment(kind="custom", target=target, parameters={"problems": 50, "size": 3, "holes": 2})
    ids = [[row["task_id"] for row in load_any(config).tasks("train")] for config in (built_in, custom)]
    assert ids[0] == ids[1]
    with pytest.raises(ConfigError, match="Gymnasium protocol"):
        load(built_in)


def test_a_lake_of_holes_is_refused() -> None:
    with pytest.raises(ValidationError, match="fill more than half"):
        FrozenLakeEnvironment(kind="frozen_lake", size=3, holes=6)


async def test_a_random_walk_seldom_arrives() -> None:
    rng = random.Random(4)
    walks = [(row, rng.choices(sorted(MOVES), k=10)) for row in LAKE.tasks("train") for _ in range(5)]
    returns = []
    for row, moves in walks:
        state, _ = await LAKE.reset(row)
        for move in moves:
            step = await LAKE.step(state, {"output": [message(move)]})
            if step.done:
                break
        returns.append(step.reward)
    assert 0 < sum(returns) / len(returns) < 0.35


async def test_an_episode_ends_after_the_allowed_steps() -> None:
    lake = load_any(FrozenLakeEnvironment(kind="frozen_lake", problems=40, steps=4))
    state, _ = await lake.reset(lake.tasks("train")[0])
    steps = [await lake.step(state, {"output": [message("jump")]}) for _ in range(4)]
    assert [step.truncated for step in steps] == [False, False, False, True]
