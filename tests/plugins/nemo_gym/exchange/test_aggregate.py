"""The figures come from NeMo Gym's own `compute_aggregate_metrics` and `compute_pass_majority_metrics` on exactly these rows;
the arithmetic next to them explains them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from roundhouse.plugins.nemo_gym.exchange.statistics import (
    aggregate_metrics,
    light,
    majority,
    pass_at_k,
    pass_rates,
)


def row(task: int, rollout: int, reward: float, usage: tuple[int, int], **fields: Any) -> dict[str, Any]:
    spent = {"input_tokens": usage[0], "output_tokens": usage[1]}
    indexes = {"_ng_task_index": task, "_ng_rollout_index": rollout}
    return {**indexes, "reward": reward, **fields, "response": {"usage": spent}}


ROWS = [
    row(0, 0, 1.0, (10, 4), right=True, words=3),
    row(0, 1, 0.0, (10, 8), right=False, words=5),
    row(0, 2, 1.0, (10, 6), right=True),
    row(1, 0, 0.0, (20, 2), right=False, seldom=7),
]


def test_statistics_are_over_the_rollouts_that_report_a_field():
    metrics = aggregate_metrics(ROWS)["agent_metrics"]
    assert metrics["mean/reward"] == metrics["median/reward"] == metrics["mean/right"] == 0.5
    assert metrics["std/reward"] == pytest.approx(0.5773502691896257)  # sqrt(4 * 0.25 / 3)
    assert metrics["mean/words"] == 4  # (3 + 5) / 2: two of the four rollouts report it
    assert metrics["std/words"] == pytest.approx(1.4142135623730951)  # sqrt((1 + 1) / 1)
    assert metrics["mean/input_tokens"] == 12.5  # (3 * 10 + 20) / 4
    assert metrics["median/output_tokens"] == 5  # of 2 4 6 8
    assert metrics["std/output_tokens"] == pytest.approx(2.581988897471611)  # sqrt((9 + 1 + 1 + 9) / 3)


def test_a_field_of_one_rollout_has_a_mean_and_no_deviation():
    metrics = aggregate_metrics(ROWS)["agent_metrics"]
    assert metrics["mean/seldom"] == 7
    assert "std/seldom" not in metrics


def test_bookkeeping_is_no_metric():
    metrics = aggregate_metrics([{**ROWS[0], "_ng_attempt_index": 2}])["agent_metrics"]
    assert not [name for name in metrics if "_ng_" in name]


def test_each_task_has_its_statistics_and_its_rollouts_in_order():
    first, second = aggregate_metrics([ROWS[2], ROWS[3], ROWS[0], ROWS[1]])["group_level_metrics"]
    assert first["mean/reward"] == pytest.approx(2 / 3)
    assert (first["num_rollouts"], first["expected_num_rollouts"], first["missing_num_rollouts"]) == (3, 3, 0)
    assert first["reward_profile_completion_pct"] == 100
    assert [info["rollout_id"] for info in first["rollout_infos"]] == ["0:0", "0:1", "0:2"]
    assert first["rollout_infos"][1] == {
        "rollout_id": "0:1",
        "_ng_task_index": 0,
        "_ng_rollout_index": 1,
        "reward": 0.0,
        "right": 0,
        "words": 5,
        "input_tokens": 10,
        "output_tokens": 8,
    }
    assert (second["_ng_task_index"], second["std/reward"]) == (1, 0)  # a single rollout deviates from nothing


def test_an_environment_adds_metrics_over_all_tasks_and_per_task():
    def accuracy(tasks: list[list[Any]]) -> dict[str, Any]:
        solved = [float(any(one["reward"] for one in rollouts)) for rollouts in tasks]
        per_task = [{"_ng_task_index": index, "solved": value} for index, value in enumerate(solved)]
        return {"solved": sum(solved) / len(solved), "per_task_metrics": per_task}

    found = aggregate_metrics(ROWS, accuracy, key_metrics=lambda metrics: {"solved": metrics["solved"]})
    assert found["agent_metrics"]["solved"] == 0.5
    assert found["key_metrics"] == {"solved": 0.5}
    assert [group["solved"] for group in found["group_level_metrics"]] == [1, 0]
    assert "per_task_metrics" not in found["agent_metrics"]


def test_what_is_sent_for_aggregation_is_the_row_without_its_conversation():
    heavy = {**ROWS[0], "responses_create_params": {"input": "long"}, "response": {"output": [1], "usage": {"n": 1}}}
    assert light(heavy) == {
        "_ng_task_index": 0,
        "_ng_rollout_index": 0,
        "reward": 1.0,
        "right": True,
        "words": 3,
        "response": {"usage": {"n": 1}},
    }


ANSWERED = [
    [{"reward": 1, "a": "x"}, {"reward": 0, "a": "y"}, {"reward": 1, "a": "x"}],
    [{"reward": 0, "a": "y"}, {"reward": 0, "a": None}, {"reward": 1, "a": "z"}],
]


def test_pass_at_k_of_right_and_wrong_is_combinatorial():
    rates = pass_rates(ANSWERED)
    assert rates["pass@1/accuracy"] == pytest.approx(50)  # (2/3 + 1/3) / 2
    assert rates["pass@2/accuracy"] == pytest.approx(83.33333333333334)  # (1 + (1 - C(2,2)/C(3,2))) / 2 = (1 + 2/3) / 2
    assert rates["pass@3/accuracy"] == 100  # each task has a right one among its three
    assert pass_at_k([1, 0, 0, 0], 2) == pytest.approx(1 - 3 / 6)  # 1 - C(3,2)/C(4,2)


def test_pass_at_1_averaged_over_k_comes_with_its_spread_over_runs():
    rates = pass_rates(ANSWERED)
    assert rates["per_sample_aggregate"]["accuracy"] == [50, 0, 100]  # (1+0)/2, (0+0)/2, (1+1)/2
    assert rates["pass@1[avg-of-2]/accuracy"] == 25  # (1/2 + 0) / 2
    key = "pass@1[avg-of-3]/accuracy"
    assert rates[key] == 50
    assert rates[f"{key}/std_dev_across_runs"] == pytest.approx(50)  # of 50, 0, 100
    assert rates[f"{key}/std_err_across_runs"] == pytest.approx(50 / math.sqrt(3))
    assert rates[f"{key}/avg_sample_std_dev"] == pytest.approx(0.5773502691896258)  # 1 0 1 and 0 0 1: sqrt(1/3) each


def test_majority_scores_the_most_frequent_answer_and_ties_share():
    rates = pass_rates(ANSWERED, answer_key="a")
    assert rates["majority@2/accuracy"] == 25  # x and y tie at (1 + 0)/2; only y answered: 0
    assert rates["majority@3/accuracy"] == 75  # x twice: 1; y and z tie at (0 + 1)/2
    assert rates["pass@1/no_answer"] == pytest.approx(100 / 6)  # (0 + 1/3) / 2
    assert majority([None, None], [1, 1]) == 0


def test_graded_scores_take_the_best_of_the_first_k():
    rates = pass_rates([[{"reward": 0.5}, {"reward": 0.25}], [{"reward": 0.0}, {"reward": 1.0}, {"reward": 0.2}]])
    assert rates["pass@1/accuracy"] == 25  # (0.5 + 0) / 2
    assert rates["pass@2/accuracy"] == 75  # (0.5 + 1) / 2
    assert rates["pass@3/accuracy"] == 100  # only the second task has three
    assert rates["pass@1[avg-of-3]/accuracy"] == pytest.approx(38.75)  # (0.375 + 0.4) / 2


def test_rates_of_nothing_are_nothing():
    assert pass_rates([]) == {}
