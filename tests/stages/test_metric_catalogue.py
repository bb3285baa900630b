"""The metrics page is printed from the code and agrees with the logged metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.collection.collector import rollout_metrics
from roundhouse.stages.evaluate import evaluation_metrics
from roundhouse.stages.metric_catalogue import CATALOGUE, meaning_of, page
from roundhouse.tracking.mlflow import FIRST_LOOK
from roundhouse.trajectories.records import Rollout, Status, Turn


def test_the_page_is_the_catalogue_printed():
    there = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert there == page(), "run: python -m roundhouse.stages.metric_catalogue > docs/metrics.md"


def test_every_number_of_a_set_of_rollouts_is_in_the_catalogue():
    turn = Turn(0, None, [1], 1, "d", [2], [-0.1], 0, "stop", 0.1)
    rollouts = [
        Rollout(
            "t", 0, {"task_id": "t"}, "e", Status.COMPLETED, reward=1.0, turns=[turn], metrics={"agent_tool_calls": 1}
        ),
        Rollout("t", 1, {"task_id": "t"}, "e", Status.FAILED),
    ]
    logged = rollout_metrics(rollouts) | evaluation_metrics(rollouts)
    assert [name for name in logged if meaning_of(name) is None] == []
    assert len(logged) > 30


@pytest.mark.parametrize(
    ("metric", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/format", "reward/*"),
        ("evaluation/reward/mean", "evaluation/reward/mean"),
        ("overhead/train", "overhead/*"),
        ("train/loss", "train/loss"),
    ],
)
def test_the_most_specific_row_explains_a_metric(metric: str, row: str):
    found = meaning_of(metric)
    assert found is not None
    assert found.name == row


def test_a_name_nobody_wrote_down_is_in_no_table():
    assert meaning_of("train/no_such_metric") is None


def test_no_row_stands_twice():
    names = [row.name for section in CATALOGUE for row in section.entries]
    assert len(names) == len(set(names))


def test_what_to_look_at_first_is_in_the_catalogue():
    assert [name for name in FIRST_LOOK if meaning_of(name) is None] == []
