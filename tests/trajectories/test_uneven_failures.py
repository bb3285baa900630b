"""Failures that depend on the course of a rollout are distinguished from random ones."""

import random
from typing import Any

import pytest

from roundhouse.collection.collector import rollout_metrics
from roundhouse.config.operations import AlertsConfig
from roundhouse.console import iteration_line
from roundhouse.health.errors import DOUBT, UNEVEN, new_alerts
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.uneven_failures import FEATURES, Outcome, uneven_failures
from tests.trajectories.rollouts import turn


def outcomes(seed: int, fails: Any, kind: FailureKind = FailureKind.DATA) -> list[Outcome]:
    """128 rollouts of 32 tasks; `fails` is given the difficulty of the task, the successful calls and the tokens."""
    generator, made = random.Random(seed), []
    for task in range(32):
        ease = generator.random()
        for _ in range(4):
            calls, tokens = generator.choice([0, 1, 2]), generator.randint(10, 90)
            failed = fails(generator.random(), ease, calls, tokens)
            made.append(Outcome(kind if failed else None, task, calls, 1 + calls, tokens))
    return made


def test_failures_by_chance_are_no_symptom():
    found = [uneven_failures(outcomes(seed, lambda draw, *_: draw < 0.15)) for seed in range(30)]
    assert sum(min(each.values()) < 0.05 for each in found) <= 4
    assert all(min(each.values()) > DOUBT for each in found)


@pytest.mark.parametrize(
    ("fails", "feature"),
    [
        (lambda draw, ease, calls, tokens: ease > 0.8 and draw < 0.9, "task"),
        (lambda draw, ease, calls, tokens: calls == 2 and draw < 0.4, "successful_calls"),
        (lambda draw, ease, calls, tokens: tokens > 75 and draw < 0.7, "tokens"),
    ],
)
def test_failures_that_depend_on_a_feature_are_attributed_to_it(fails: Any, feature: str):
    chances = uneven_failures(outcomes(1, fails))
    assert chances[feature] < DOUBT
    assert min(chances, key=chances.__getitem__) == feature


def test_an_outage_that_hits_whole_tasks_is_not_uneven_by_task():
    found = uneven_failures(outcomes(1, lambda draw, ease, *_: ease > 0.8, FailureKind.INFRA))
    assert "task" not in found


def test_a_few_failures_say_nothing():
    assert uneven_failures(outcomes(1, lambda draw, ease, *_: ease > 0.98)) == {}


def judged(sample: int, reward: float | None, calls: float = 1.0) -> Rollout:
    failed = reward is None
    return Rollout(
        f"g{sample // 4}",
        sample % 4,
        {},
        "e",
        Status.FAILED if failed else Status.COMPLETED,
        reward=reward,
        metrics={"agent_tool_calls": calls},
        turns=[turn(0, [], [1], [2])],
        failure_kind=FailureKind.DATA if failed else None,
        failure_code="verifier_failed" if failed else "",
    )


def alerts(rollouts: list[Rollout], iterations: int = 1) -> list[str]:
    metrics = rollout_metrics(rollouts)
    return [alert.message for alert in new_alerts(AlertsConfig(), [{}] * 5 + [metrics] * iterations)]


def test_a_verifier_that_raises_for_right_answers_is_an_alert_and_in_the_iterations_line():
    rollouts = [judged(sample, None if sample % 6 == 0 else 0.0) for sample in range(64)]
    [message] = alerts(rollouts)
    assert "11 rollouts failed by their data, and 0 of the others have more than the lowest reward" in message
    assert iteration_line(1, 2, rollout_metrics(rollouts)).endswith("failed 17%: verifier_failed 11")


def test_as_many_failures_of_a_policy_that_is_mostly_right_are_no_alert():
    assert alerts([judged(sample, None if sample % 6 == 0 else 1.0) for sample in range(64)]) == []


def test_failures_that_depend_on_the_tool_calls_are_an_alert_that_names_them():
    rollouts = [judged(sample, *((None, 3.0) if sample % 6 == 0 else (1.0, 1.0))) for sample in range(64)]
    [message] = alerts(rollouts)
    assert "depend on successful calls" in message


def test_three_iterations_together_show_what_one_does_not():
    chances = {UNEVEN[1]: 0.02}
    assert new_alerts(AlertsConfig(), [chances]) == []
    [alert] = new_alerts(AlertsConfig(), [chances] * 3)
    assert alert.name == "uneven_failures"
    assert tuple(f"uneven_failures/{name}" for name in FEATURES) == UNEVEN
