"""Datasets by moment: one complete version each, of one policy version, and the newest are kept."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.stages.datasets import (
    TaskDraw,
    collected_moments,
    dataset_stage,
    dataset_versions,
    retain_versions,
    version_for,
)
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference

NIGHT = TaskDraw.of_moment(datetime(2026, 11, 21, 2, tzinfo=UTC))
NEXT_NIGHT = TaskDraw.of_moment(datetime(2026, 11, 22, 2, tzinfo=UTC))


@pytest.fixture
def run(store_uri: str) -> Run:
    run = open_run(parse_config({"run_id": "r", "store": store_uri}))
    for version in range(3):
        run.begin(run.checkpoint(version), policy_version=version).commit()
    return run


def collected(run: Run, draw: TaskDraw, version: int) -> Reference:
    stage = dataset_stage(run, "nightly", draw.label(version), draw)
    return run.begin(stage, policy_version=version).commit()


def test_each_moment_draws_tasks_of_its_own_and_names_its_version(run: Run) -> None:
    assert NIGHT.iteration != NEXT_NIGHT.iteration
    assert NIGHT.label(2) == "20261121T020000Z-v000002"
    assert TaskDraw(3).label(2) == "v000002-i000003"


def test_a_collection_that_is_tried_again_goes_on_with_the_version_that_it_began_with(run: Run) -> None:
    assert version_for(run, "nightly", NIGHT, None) is None, "the newest"
    run.begin(dataset_stage(run, "nightly", NIGHT.label(1), NIGHT), policy_version=1)
    assert version_for(run, "nightly", NIGHT, None) == 1, "though version 2 is there by now"
    assert version_for(run, "nightly", NEXT_NIGHT, None) is None
    collected(run, NIGHT, 1)
    assert version_for(run, "nightly", NIGHT, 2) == 1, "the moment is collected"


def test_moments_that_were_collected_are_known(run: Run) -> None:
    collected(run, NIGHT, 1)
    run.begin(dataset_stage(run, "nightly", NEXT_NIGHT.label(1), NEXT_NIGHT), policy_version=1)
    assert collected_moments(run.config.store, "nightly") == {"20261121T020000Z"}


def test_retention_deletes_the_oldest_complete_versions_and_nothing_unfinished(run: Run) -> None:
    references = [collected(run, TaskDraw(draw), 1) for draw in (1, 2, 3)]
    run.begin(dataset_stage(run, "nightly", NIGHT.label(1), NIGHT), policy_version=1)
    assert retain_versions(run.config.store, "nightly", 2) == [references[0].uri]
    assert dataset_versions(run.config.store, "nightly") == references[1:]
    assert version_for(run, "nightly", NIGHT, None) == 1
    assert retain_versions(run.config.store, "nightly", 2) == []
