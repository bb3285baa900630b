"""A masked rollout keeps its reward on record, and counts in no mean."""

from pathlib import Path

import pytest

from roundhouse.collection.collector import deviation, mean, rollout_metrics
from roundhouse.config.loading import parse_config
from roundhouse.stages.evaluate import evaluation_metrics
from roundhouse.store.run import open_run
from roundhouse.trajectories.records import Rollout, Status, groups_with_spread
from roundhouse.trajectories.schemas import rollouts_table, turns_table


def judged(sample: int, reward: float, status: Status = Status.COMPLETED) -> Rollout:
    return Rollout(
        "g", sample, {}, "e", status, reward=reward, reward_components={"part": reward}, metrics={"solved": reward}
    )


ROLLOUTS = [judged(0, 1.0), judged(1, 1.0, Status.TRUNCATED), judged(2, -7.0, Status.MASKED)]


def test_a_masked_rollout_counts_in_no_mean_of_a_collection():
    metrics = rollout_metrics(ROLLOUTS)
    assert {metrics[name] for name in ("reward/mean", "reward/min", "reward/part", "environment/solved")} == {1.0}
    assert metrics["rollout/masked_rate"] == 1 / 3


def test_a_masked_rollout_counts_in_no_evaluation_and_no_spread():
    metrics = evaluation_metrics(ROLLOUTS)
    assert metrics["evaluation/reward/mean"] == metrics["evaluation/pass_at_1"] == 1.0
    assert groups_with_spread(ROLLOUTS) == []


def test_the_largest_numbers_have_a_mean_and_a_deviation():
    assert mean([1.5e308, 1.5e308, -1.5e308]) == 5e307
    assert deviation([1e200, -1e200]) == 1e200 * 2**0.5


def test_a_masked_rollout_counts_in_no_comparison_of_a_replay_and_no_symptom(tmp_path: Path) -> None:
    comparison = pytest.importorskip("roundhouse.plugins.lab.replays.comparison")
    symptoms = pytest.importorskip("roundhouse.plugins.lab.simulation.symptoms").symptoms
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    references = []
    for iteration in (1, 2):
        attempt = run.begin(run.stage(iteration, "collect"), policy_version=0)
        attempt.write_table("turns", turns_table(ROLLOUTS))
        attempt.write_table("rollouts", rollouts_table(ROLLOUTS))
        references.append(attempt.commit())
    found = comparison.compare_stage(comparison.Comparison("", {}, {}, []), *references, by_distribution=True)
    assert found.distribution["reward"]["before"] == found.distribution["reward"]["after"] == 1.0
    assert "every reward is 1" in [each.symptom for each in symptoms(run)]
