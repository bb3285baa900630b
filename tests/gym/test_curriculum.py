"""Tasks drawn by recorded difficulty: weights, the draw, and its benefit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roundhouse.config.models import RolloutConfig
from roundhouse.environments.base import TaskRow, task_row
from roundhouse.errors import ConfigError, DataError
from roundhouse.rollout.plan import TaskHistory, WeightedTasks, build_curriculum, round_tasks, sample_rounds
from roundhouse.trajectories.records import Rollout, Status, derive_seed, groups_with_spread

PER_ITERATION, GROUP = 8, 8


def rows(count: int, prefix: str = "t") -> list[TaskRow]:
    return [task_row("x", task_id=f"{prefix}{index}") for index in range(count)]


def config(**curriculum: Any) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {
            "prompts_per_iteration": PER_ITERATION,
            "group_size": GROUP,
            "curriculum": {"kind": "success_band"} | curriculum,
        }
    )


def drawn(tasks: Sequence[TaskRow], history: TaskHistory, iteration: int, number: int = 1, **keys: Any) -> list[str]:
    return [row["task_id"] for row in round_tasks(tasks, config(**keys), 0, iteration, number, history)]


def weight_of(rewards: Sequence[float], **keys: Any) -> float:
    curriculum = build_curriculum(config(**keys).curriculum)
    assert curriculum is not None
    [weight] = curriculum.weights(rows(1), {"t0": [rewards]} if rewards else {})
    return weight


@pytest.mark.parametrize(
    ("rewards", "keys", "weight"),
    [
        ([0, 0, 0, 0], {}, 0.05),
        ([1, 0, 0, 0], {}, 1.0),
        ([1, 1, 1, 1], {}, 0.05),
        ([1] + [0] * 9, {}, 0.525),
        ([1] + [0] * 9, {"falloff": 0.1}, 0.05),
        ([1, 1, 1, 1], {"outside_weight": 0.5}, 0.5),
        ([1, 1, 1, 0], {"band": [0.2, 0.7], "falloff": 0.1}, 0.525),
        ([1, 0, 0, 0], {"band": [0.5, 0.8], "falloff": 0.1}, 0.05),
        ([2.0, 3.0, 2.0, 3.0], {"band": [1, 4]}, 1.0),
        ([2.0, 3.0, 2.0, 3.0], {"pass_threshold": 2.0}, 0.05),
        ([2.0, 3.0, 2.0, 3.0], {"pass_threshold": 2.5}, 1.0),
        ([], {"unseen_weight": 7}, 7.0),
    ],
)
def test_a_task_weighs_by_how_far_its_rate_is_from_the_band(rewards: Any, keys: dict[str, Any], weight: float) -> None:
    assert weight_of(rewards, **keys) == pytest.approx(weight)


def test_tasks_are_drawn_in_proportion_to_their_weights_and_none_twice() -> None:
    history = {f"t{index}": [[1.0]] for index in range(20)}  # too easy, unlike the other twenty
    tasks, often = rows(40), Counter[str]()
    for iteration in range(400):
        chosen = drawn(tasks, history, iteration, outside_weight=0.25)
        assert len(set(chosen)) == PER_ITERATION
        often.update(chosen)
    easy = sum(often[task] for task in history)
    assert easy / often.total() == pytest.approx(0.2, abs=0.04), "a quarter of the weight of as many others"
    assert len(often) == 40, "each comes up"


def test_rounds_of_an_iteration_go_on_in_one_order_until_all_tasks_were_drawn() -> None:
    tasks = rows(20)
    rounds = [drawn(tasks, {}, 3, number) for number in (1, 2, 3)]
    assert len({*rounds[0], *rounds[1], *rounds[2]}) == 20
    assert rounds[2][4:] == rounds[0][:4]
    assert drawn(tasks, {}, 4) != rounds[0]


def test_the_draw_is_the_same_on_every_machine() -> None:
    assert drawn(rows(12), {"t1": [[0.0]], "t2": [[1.0, 0.0]]}, 2) == ["t5", "t10", "t11", "t8", "t0", "t6", "t7", "t9"]


def test_each_environment_of_a_mixture_keeps_its_share_and_draws_by_its_own_difficulty() -> None:
    tasks = WeightedTasks({"a": rows(12, "a/"), "b": rows(12, "b/")}, {"a": 3, "b": 1})
    history = {f"a/{index}": [[0.0]] for index in range(5)}
    chosen = [drawn(tasks, history, iteration, outside_weight=0.001) for iteration in range(20)]
    assert {sum(task.startswith("a/") for task in each) for each in chosen} <= {5, 6, 7}
    often = Counter(task for each in chosen for task in each)
    assert sum(often[task] for task in history) <= 3, "the seven others are enough for the share"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"epochs": 2}, "epochs is 2.*draws by difficulty.*Remove epochs"),
        ({"shuffle": False}, "shuffle is False.*Remove shuffle"),
        ({"drop_last": True}, "drop_last is True.*Remove drop_last"),
        ({"curriculum": {"kind": "success_band", "band": [0.8, 0.2]}}, "holds no rate.*lower bound first"),
        ({"curriculum": {"kind": "success_band", "band": [0, 2], "pass_threshold": 1}}, "a share, from 0 to 1"),
    ],
)
def test_what_cannot_be_drawn_by_is_refused_with_the_remedy(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutConfig.model_validate({"curriculum": {"kind": "success_band"}} | keys)


def test_fewer_tasks_than_an_iteration_draws_leave_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"of 7 training tasks 7 .*fewer than the 8.*rollout.prompts_per_iteration"):
        drawn(rows(7), {}, 1)
    with pytest.raises(DataError, match="no task_id"):
        drawn([*rows(9), {"responses_create_params": {}}], {}, 1)


OWN = """
from roundhouse.rollout.plan import Curriculum, mean_reward

class Hardest(Curriculum):
    def __init__(self, above=0.0):
        self.above = above

    def weights(self, tasks, history):
        return [{weight} for task in tasks]{more}
"""


def own(directory: Path, weight: str, more: str = "", **parameters: Any) -> dict[str, Any]:
    path = directory / f"own_{abs(hash((weight, more)))}.py"
    path.write_text(OWN.format(weight=weight, more=more))
    return {"kind": "custom", "target": f"{path}:Hardest", "parameters": parameters}


def test_a_class_of_ones_own_weighs_the_tasks_from_rows_and_rewards(tmp_path: Path) -> None:
    history = {f"t{index}": [[index / 20]] for index in range(20)}
    weigh = "float(mean_reward(history[task['task_id']]) > self.above)"
    chosen = drawn(rows(20), history, 1, **own(tmp_path, weigh, above=0.5))
    assert len(chosen) == PER_ITERATION
    assert {int(task[1:]) for task in chosen} <= set(range(11, 20))


@pytest.mark.parametrize(
    ("weight", "more", "parameters", "message"),
    [
        ("-1.0", "", {}, "the weight of task 't0' is -1.0"),
        ("float('nan')", "", {}, "the weight of task 't0' is nan"),
        ("1.0", "[1:]", {}, "19 weights for 20 tasks"),
        ("0.0", "", {}, "of 20 training tasks 0 have a weight above 0"),
        ("1.0", "", {"below": 1}, "cannot be made with rollout.curriculum.parameters.*below"),
    ],
)
def test_a_class_of_ones_own_that_weighs_wrongly_is_refused(
    tmp_path: Path, weight: str, more: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        drawn(rows(20), {}, 1, **own(tmp_path, weight, more, **parameters))


def test_what_was_drawn_is_counted_by_band() -> None:
    curriculum = build_curriculum(config().curriculum)
    assert curriculum is not None
    history = {"t0": [[0.0]], "t1": [[0.0], [1.0]], "t2": [[1.0]]}
    assert curriculum.metrics(rows(5), history) == {
        "curriculum/unseen": 0.4,
        "curriculum/below_band": 0.2,
        "curriculum/in_band": 0.2,
        "curriculum/above_band": 0.2,
    }


def spread_share(curriculum: dict[str, Any], iterations: int = 40) -> float:
    """Share of groups with spread, of a policy that solves a third of the tasks always, a third never, a third sometimes."""
    tasks, settings = rows(60), config(**curriculum)
    history: dict[str, list[list[float]]] = {}
    spread = groups = 0
    for iteration in range(1, iterations + 1):
        found = sample_rounds(tasks, settings, 0, iteration, lambda specs: [scripted(spec) for spec in specs], history)
        spread += len(groups_with_spread(found.rollouts))
        groups += PER_ITERATION
        made: dict[str, list[float]] = {}
        for rollout in found.rollouts:
            made.setdefault(rollout.group_id, []).append(rollout.reward or 0.0)
        for task, rewards in made.items():
            history.setdefault(task, []).append(rewards)
    return spread / groups


def scripted(spec: Any) -> Rollout:
    chance = (0, 500, 1000)[int(spec.row["task_id"][1:]) % 3]
    reward = float(derive_seed(spec.seed, "answer") % 1000 < chance)
    return Rollout(spec.group_id, spec.sample, spec.row, "e", Status.COMPLETED, reward=reward)


def test_a_band_draws_groups_with_spread_about_twice_as_often_as_passes_over_all_tasks() -> None:
    uniform, banded = spread_share({"kind": "epochs"}), spread_share({})
    assert uniform == pytest.approx(1 / 3, abs=0.03)
    assert banded > 1.8 * uniform
