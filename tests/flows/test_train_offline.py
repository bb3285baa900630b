"""A missed night is collected with the promoted checkpoint, and a run learns from it: deployments, used like by a person. An
older night is deleted. The source run was made without deployments: its promoted checkpoint is not its newest.

The story happens once; each test is a claim about its observations.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from roundhouse.sql.lineage import trained_on
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.datasets import TaskDraw, dataset_stage, dataset_versions, users_of_datasets
from roundhouse.store.run import Run, open_run, point_to_promoted, promoted_version
from roundhouse.store.stage import read_manifest
from roundhouse_flows.forms import CollectForm, TrainForm
from roundhouse_flows.schedules import add_schedule, back_fill, missed, remove_schedule
from tests.flows.served import Served
from tests.stages.test_checkpoint import trained

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def learnt(served: Served) -> Run:
    """The offline run."""
    run = _taught(served)
    night = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    older = TaskDraw.of_moment(night - timedelta(days=1))
    run.begin(dataset_stage(run, "lessons", older.label(0), older), policy_version=0).commit()
    with served.at_prefect():
        kept = {"name": "lessons", "keep_last": 1}
        form = CollectForm(run_id="taught", store=served.store, checkpoint="promoted", prompts_per_iteration=3, **kept)
        add_schedule(form, "0 0 * * *")
        [moment] = missed("lessons", night, night + timedelta(hours=1))
        [asked] = back_fill("lessons", [moment])
        served.wait(asked, "COMPLETED")
        assert missed("lessons", night, night + timedelta(hours=1)) == []
        remove_schedule("lessons")
    settings = {"run_id": "taught", "store": served.store, "new_run_id": "learnt", "datasets": ["lessons"]}
    flow_run = served.start("train-offline", **settings, at="promoted", epochs=2, groups=2, on_stale="warn")
    served.wait(flow_run, "COMPLETED")
    return served.run("learnt")


def test_a_missed_night_is_collected_with_the_promoted_checkpoint_and_retention_keeps_the_newest(
    learnt: Run, served: Served
) -> None:
    [night] = dataset_versions(served.store, "lessons")
    assert re.fullmatch(rf"\d{{8}}T000000Z-v{night.policy_version:06d}", night.uri.rsplit("/", 1)[-1])
    assert night.policy_version == promoted_version(served.run("taught"))
    assert night.counts["requested"] == 3 * 2, "three tasks as the form says, though the run has two an iteration"


def test_a_run_learns_from_it_and_is_evaluated_and_promoted_as_any(learnt: Run, served: Served) -> None:
    assert learnt.parent is not None
    first = learnt.first_version
    assert first == promoted_version(served.run("taught"))
    summary = learnt.summary()
    assert summary is not None
    assert summary["iterations"] == first + 4, "two epochs of two batches"
    assert [entry["version"] for entry in summary["evaluation"]["all"]] == [first, first + 4]
    assert promoted_version(learnt) is not None
    for k in range(first + 1, first + 5):
        assert learnt.stage(k, "collect").reference() is None
        for kind in ("validate", "train", "report"):
            reference = learnt.stage(k, kind).reference()
            assert reference is not None, (k, kind)
            assert read_manifest(reference).attempt == 1


def test_lineage_leads_from_its_versions_to_the_night(learnt: Run, served: Served) -> None:
    [night] = dataset_versions(served.store, "lessons")
    assert users_of_datasets(served.store) == {night.uri: ["learnt"]}
    version = learnt.first_version + 4
    own = [entry for entry in trained_on(served.store, "learnt", version).iterations if entry["run_id"] == "learnt"]
    assert {entry["dataset"] for entry in own} == {f"lessons@{night.uri.rsplit('/', 1)[-1]}"}


def _taught(served: Served) -> Run:
    """A run with the served policy as versions 0, the promoted one, and 1."""
    run = open_run(TrainForm(preset="small", run_id="taught", iterations=1).resolve(str(served.directory / "state")))
    publish_starting_policy(run, served.directory / "policy", {})
    point_to_promoted(run, 0)
    publish(run, trained(run, 1, served.directory / "policy"))
    return run
