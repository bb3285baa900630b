"""A masked rollout counts in no mean of a file of rollouts."""

from __future__ import annotations

from pathlib import Path

from roundhouse.plugins.nemo_gym.exchange.collection import Summary
from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles
from roundhouse.plugins.nemo_gym.exchange.statistics import aggregate_metrics


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


def test_a_masked_rollout_counts_in_no_line_of_a_collection(tmp_path: Path) -> None:
    summary = Summary(CollectionFiles(tmp_path / "rollouts.jsonl"), 2, completed=2, rewarded=1, reward_sum=1.0)
    assert "2 rollouts · mean reward 1.000" in summary.line()
