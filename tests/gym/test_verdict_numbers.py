"""The numbers of a verdict: a reward is finite or a failure; a metric that cannot be reported is left out and counted."""

import math
from typing import Any

import pytest

from roundhouse.collection.collector import rollout_metrics
from roundhouse.environments.base import BadReward, Verdict
from roundhouse.rollout.agents import checked_verdict, reported_metrics
from roundhouse.trajectories.records import Rollout, Status


@pytest.mark.parametrize(
    "metrics",
    [
        {"a": math.nan},
        {"a": -math.inf},
        {"a": 10**400},
        {"a": 10**5000},
        {"a": None},
        {"a": "1"},
        {"a": [1.0]},
        {"": 1.0},
        {"a\nb": 1.0},
        {"\x00": 1.0},
        {"\ud83d": 1.0},
        {"a" * 201: 1.0},
        [1.0],
    ],
)
def test_a_metric_that_cannot_be_reported_is_left_out_and_the_reward_stands(metrics: Any):
    verdict = checked_verdict(Verdict(1.0, metrics=metrics))
    assert (verdict.reward, verdict.metrics) == (1.0, {"metrics_left_out": 1.0})


def test_names_with_signs_and_letters_of_any_script_are_kept():
    metrics = {"pass@1": 1.0, "50 %": 0.5, "größe/x": 2.0}
    assert reported_metrics(metrics) == metrics


def test_a_verdict_has_a_thousand_metrics_at_most():
    reported = reported_metrics({f"m{number}": 1.0 for number in range(1500)})
    assert (len(reported), reported["metrics_left_out"]) == (1001, 500.0)


def test_a_collection_reports_the_thousand_names_that_most_rollouts_have():
    rollouts = [
        Rollout(
            "g", n, {}, "e", Status.COMPLETED, reward=1.0, metrics={"zz": 1.0} | {f"{n}-{i}": 0.0 for i in range(600)}
        )
        for n in range(2)
    ]
    metrics = rollout_metrics(rollouts)
    assert sum(name.startswith("environment/") for name in metrics) == 1000
    assert metrics["environment/zz"] == 1.0
    assert metrics["rollout/metrics_left_out"] == 201.0


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(10**400),
        Verdict(10**5000),
        Verdict(1.0, {"a\n": 1.0}),
        Verdict(1.0, {f"c{n}": 1e-3 for n in range(1001)}),
        Verdict(0.0, {"a": 1.7e308, "b": 1.7e308}),
        Verdict(1.0, [1.0]),  # type: ignore[arg-type]
    ],
)
def test_a_reward_or_component_that_is_no_usable_number_is_a_bad_reward(verdict: Verdict):
    with pytest.raises(BadReward):
        checked_verdict(verdict)
