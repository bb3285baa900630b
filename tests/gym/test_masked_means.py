"""A masked rollout keeps its reward on record, and counts in no mean."""

from pathlib import Path

import pytest

from roundhouse.collection.collector import deviation, mean, rollout_metrics
from roundhouse.config.loading import parse_config
from roundhouse.plugins.nemo_gym.exchange.collection import Summary
from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles
from roundhouse.plugins.nemo_gym.exchange.statistics import aggregate_metrics
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


def test_a_masked_rollout_counts_in_no_aggregate():
    rows = [
        {"_ng_task_index": 0, "_ng_rollout_index": n, "reward": r, "mask_sample": r < 0} for n, r in enumerate([1, -7])
    ]
    seen: list[int] = []

    def own_metrics(tasks: list[list[dict]]) -> dict[str, float]:
        seen.extend(len(rollouts) for rollouts in tasks)
        return {}

    found = aggregate_metrics(rows, own_metrics)
    assert found["agent_metrics"]["mean/reward"] == found["group_level_metrics"][0]["min/reward"] == 1
    assert not [name for name in found["agent_metrics"] if "mask_sample" in name]
    assert found["key_metrics"]["coverage/masked_rollouts"] == found["agent_metrics"]["coverage/measured_tasks"] == 1
    assert (seen, found["group_level_metrics"][0]["num_rollouts"]) == ([1], 1)


def test_a_collection_that_is_masked_as_a_whole_has_no_mean():
    found = aggregate_metrics([{"_ng_task_index": task, "reward": 1.0, "mask_sample": True} for task in range(2)])
    assert (found["group_level_metrics"], found["repeat_level_metrics"]) == ([], [])
    assert found["agent_metrics"] == found["key_metrics"]
    assert found["agent_metrics"]["coverage/fully_masked_tasks"] == 2


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


def test_a_masked_rollout_counts_in_no_line_of_a_collection(tmp_path: Path) -> None:
    summary = Summary(CollectionFiles(tmp_path / "rollouts.jsonl"), 2, completed=2, rewarded=1, reward_sum=1.0)
    assert "2 rollouts · mean reward 1.000" in summary.line()
