"""Plans and the choice of tasks: pure, and the same everywhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.collection.shards import PlannedGroup
from roundhouse.config.models import RolloutConfig
from roundhouse.environments.base import task_row
from roundhouse.errors import ConfigError, DataError
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient
from roundhouse.rollout.plan import (
    branch_spec,
    iterations_of,
    plan_rollouts,
    round_tasks,
    sample_rounds,
    sample_tasks,
)
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.counter import Counter
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config, says


def rows(count: int):
    return [task_row("x", task_id=f"t{index}") for index in range(count)]


def test_a_plan_is_groups_in_order_with_seeds_of_their_own():
    specs = plan_rollouts(rows(3), 4, seed=1, iteration=2)
    assert [spec.rollout_id for spec in specs] == [f"t{task}/{sample}" for task in range(3) for sample in range(4)]
    assert len({spec.seed for spec in specs}) == 12
    assert specs == plan_rollouts(rows(3), 4, seed=1, iteration=2)
    assert {spec.seed for spec in specs}.isdisjoint(
        spec.seed for spec in plan_rollouts(rows(3), 4, seed=1, iteration=3)
    )


def test_a_rollouts_seed_does_not_depend_on_the_rest_of_the_plan():
    all_of_them = {spec.rollout_id: spec.seed for spec in plan_rollouts(rows(5), 4, seed=1, iteration=0)}
    for spec in plan_rollouts(rows(5)[3:], 2, seed=1, iteration=0):
        assert all_of_them[spec.rollout_id] == spec.seed


def test_a_task_that_comes_twice_makes_two_groups():
    specs = plan_rollouts(rows(1) * 2, 2, seed=1, iteration=0)
    assert [spec.rollout_id for spec in specs] == ["t0/0", "t0/1", "t0#2/0", "t0#2/1"]
    assert len({spec.seed for spec in specs}) == 4


NOT_JSON = ({"when": object()}, {"score": float("nan")}, {1: "one"})


@pytest.mark.parametrize("fields", NOT_JSON, ids=["object", "nan", "key"])
async def test_a_task_row_that_is_not_json_fails_its_own_rollouts_in_a_shard_too(fields: dict[Any, Any]):
    good, odd = plan_rollouts([task_row("x", task_id="good"), task_row("x", task_id="odd") | fields], 1, 0, 0)
    assert good.row == task_row("x", task_id="good")
    group = PlannedGroup(group_id="odd", row=odd.row, seeds={0: odd.seed})
    assert PlannedGroup.model_validate_json(group.model_dump_json()).row == odd.row
    policy, world = ScriptedPolicy(by_turn(says("done"))), LocalEnvironmentClient(Counter())
    rollout = await run_rollout(odd, policy, world, rollout_config(), SAMPLING)
    assert (rollout.group_id, rollout.failure_code) == ("odd", "bad_task_row")
    assert rollout.failure_detail.startswith("The task row is not JSON:")


def test_a_task_id_with_half_a_character_is_repaired():
    [spec] = plan_rollouts([task_row("x", task_id="a\ud83d")], 1, 0, 0)
    assert (spec.group_id, spec.row["task_id"]) == ("a\ufffd", "a\ufffd")


def test_a_row_without_an_id_is_refused():
    with pytest.raises(DataError, match="row 1 has no task_id"):
        plan_rollouts([*rows(1), {"responses_create_params": {"input": "x"}}], 2, seed=1, iteration=0)


@given(count=st.integers(1, 40), n=st.integers(1, 50), seed=st.integers(0, 5))
def test_no_task_comes_twice_in_an_epoch_and_none_is_left_out(count: int, n: int, seed: int):
    drawn = [row["task_id"] for iteration in range(6) for row in sample_tasks(rows(count), seed, iteration, n)]
    assert len(drawn) == 6 * n
    for begin in range(0, len(drawn), count):
        epoch = drawn[begin : begin + count]
        assert len(set(epoch)) == len(epoch)


def test_epochs_seeds_and_iterations_shuffle_differently():
    epochs = {tuple(row["task_id"] for row in sample_tasks(rows(20), 0, epoch, 20)) for epoch in range(5)}
    assert len(epochs) == 5
    assert sample_tasks(rows(20), 0, 0, 20) != sample_tasks(rows(20), 1, 0, 20)


def test_the_choice_is_the_same_on_every_machine():
    assert [row["task_id"] for row in sample_tasks(rows(8), 3, 1, 5)] == ["t4", "t7", "t1", "t5", "t2"]


def test_unshuffled_tasks_come_in_the_order_of_the_rows_and_the_last_may_be_dropped():
    def drawn(**options: bool) -> list[str]:
        return [row["task_id"] for k in range(4) for row in sample_tasks(rows(5), 3, k, 2, **options)]

    assert drawn(shuffle=False) == ["t0", "t1", "t2", "t3", "t4", "t0", "t1", "t2"]
    assert drawn(shuffle=False, drop_last=True) == ["t0", "t1", "t2", "t3"] * 2
    dropping = drawn(drop_last=True)
    assert all(len(set(dropping[begin : begin + 4])) == 4 for begin in (0, 4))
    with pytest.raises(ConfigError, match=r"5 training tasks are fewer than 6 \(rollout.prompts_per_iteration"):
        sample_tasks(rows(5), 3, 0, 6, drop_last=True)


@pytest.mark.parametrize(
    ("drop_last", "tasks", "iterations"), [(False, 5, 5), (True, 5, 4), (False, 4, 4), (True, 4, 4)]
)
def test_epochs_take_so_many_iterations(drop_last: bool, tasks: int, iterations: int):
    assert iterations_of(tasks, RolloutConfig(prompts_per_iteration=2, drop_last=drop_last, epochs=2)) == iterations


def test_shuffled_epochs_that_are_counted_begin_with_the_first_iteration():
    config = RolloutConfig(prompts_per_iteration=4, epochs=1)
    drawn = [row["task_id"] for k in (1, 2) for row in round_tasks(rows(8), config, 0, k, 1)]
    assert sorted(drawn) == [f"t{number}" for number in range(8)], "each once"


@pytest.mark.parametrize("keys", [{}, {"epochs": 1}, {"shuffle": False}, {"dynamic_sampling": {"max_rounds": 2}}])
def test_the_iterations_of_an_epoch_draw_each_task_once(keys: dict[str, object]):
    config = RolloutConfig(prompts_per_iteration=4, **keys)
    drawn = [row["task_id"] for k in (1, 2, 3) for row in round_tasks(rows(12), config, 0, k, 1)]
    assert sorted(drawn) == sorted(row["task_id"] for row in rows(12))


def test_sampling_from_nothing_is_refused():
    with pytest.raises(ConfigError, match="no training tasks"):
        sample_tasks([], 0, 0, 4)


def identified(*task_ids: object):
    return [{"task_id": task_id, "responses_create_params": {"input": "x"}} for task_id in task_ids]


def test_a_second_group_of_a_task_takes_no_other_tasks_name():
    specs = plan_rollouts(identified("a", "a", "a", "a#2", "a#2", "a#2#"), 2, seed=1, iteration=0)
    assert [spec.group_id for spec in specs[::2]] == ["a", "a#2##", "a#3", "a#2", "a#2#2", "a#2#"]
    assert len({spec.seed for spec in specs}) == len({spec.rollout_id for spec in specs}) == 12


def test_a_second_groups_name_is_the_same_whatever_is_drawn_later():
    tasks = identified("a", "a#2", "b")
    first = plan_rollouts(identified("a", "a"), 1, seed=1, iteration=0, tasks=tasks)
    assert [spec.group_id for spec in first] == ["a", "a#2#"], "also if the task a#2 is drawn in a later round"
    assert plan_rollouts(identified("a", "a", "a#2"), 1, seed=1, iteration=0, tasks=tasks)[:2] == first


def test_every_round_of_dynamic_sampling_knows_the_names_of_all_tasks():
    config = RolloutConfig(
        prompts_per_iteration=1, group_size=2, dynamic_sampling={"max_rounds": 5, "on_exhausted": "continue"}
    )
    groups: list[str] = []

    def roll_out(specs):
        groups.extend(spec.group_id for spec in specs[::2])
        return []

    for iteration in range(1, 8):
        groups.clear()
        sample_rounds(identified("a", "a#2"), config, 0, iteration, roll_out)
        assert len(set(groups)) == len(groups) == 5
        assert {"a", "a#2"} <= set(groups), "a task's first group keeps its name"


def test_a_task_whose_id_is_the_number_0_is_planned():
    assert plan_rollouts(identified(0), 1, seed=1, iteration=0)[0].rollout_id == "0/0"


def test_a_branch_takes_no_tasks_name():
    rollout = Rollout(group_id="a", sample=0, task={"task_id": "a"}, environment="e", status=Status.COMPLETED)
    assert branch_spec(rollout, 2, 0).group_id == "a/0@2"
    assert branch_spec(rollout, 2, 0, {"a/0@2"}).group_id == "a/0@2#"
