"""Forks and resume modes, on both kinds of store and with a real trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, StoreError
from roundhouse.stages.checkpoint import publish, publish_starting_policy, retain
from roundhouse.stages.fork import fork_config, fork_run, offline_config
from roundhouse.stages.policy import delete_run, starting_policy
from roundhouse.stages.report import summarize
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.store.location import Location
from roundhouse.store.run import Run, load_run, open_run
from roundhouse.store.stage import model_location, read_manifest
from roundhouse.store.verification import collect_garbage, find_garbage, verify
from tests.stages import test_train
from tests.stages.test_checkpoint import model_directory, trained


def settings(store: str, **keys: Any) -> RunConfig:
    return parse_config({"run_id": "base", "store": store, "checkpoint": {"keep_last": 1}} | keys)


def parent_with(store: str, versions: int, directory: Path, **keys: Any) -> Run:
    run = open_run(settings(store, **keys))
    publish_starting_policy(run, model_directory(directory / "0", b"weights 0"), {})
    for version in range(1, versions + 1):
        publish(run, trained(run, version, model_directory(directory / str(version), b"weights %d" % version)))
    return run


def test_a_fork_goes_on_from_the_parents_version_and_records_its_lineage(store_uri: str, tmp_path: Path) -> None:
    parent = parent_with(store_uri, 3, tmp_path)
    fork = fork_run(fork_config(store_uri, "base", "wide", 2, ["rollout.group_size=16"]))
    assert fork.first_version == 2
    assert fork.latest_checkpoint().policy_version == 2
    assert fork.checkpoint_versions() == [0, 2], "the reference policy and the start"
    assert fork.config.rollout.group_size == 16
    recorded = json.loads(fork.location.read("run.json"))["parent"]
    assert recorded["run_id"] == "base"
    assert recorded["uid"] == parent.uid != fork.uid
    assert recorded["version"] == 2
    assert recorded["checkpoint"]["digest"] == parent.checkpoint(2).reference().digest
    adopted = read_manifest(fork.checkpoint(2).reference())
    assert adopted.inputs["parent"] == parent.checkpoint(2).reference()
    assert adopted.model_files.by_name().keys() == {"config.json", "model.safetensors", "trainer/state.json"}
    assert fork_run(fork_config(store_uri, "base", "wide", 2, ["rollout.group_size=16"])).uid == fork.uid
    assert summarize(load_run(store_uri, "wide"))["parent"]["version"] == 2


def test_retention_collection_and_deletion_of_the_parent_leave_the_fork_whole(store_uri: str, tmp_path: Path) -> None:
    parent = parent_with(store_uri, 3, tmp_path)
    fork = fork_run(fork_config(store_uri, "base", "wide", 2))
    assert retain(parent, 3) == [1, 2]
    assert find_garbage(store_uri) == []
    assert collect_garbage(store_uri, find_garbage(store_uri)) == 0
    parent.location.delete_tree()
    assert verify(store_uri).problems == []
    assert load_run(store_uri, "wide").latest_checkpoint() == fork.latest_checkpoint()
    assert model_location(fork.checkpoint(2).location).read("model.safetensors") == b"weights 2"
    assert retain(fork, 9) == [], "a fork keeps the version that it started from"


def test_a_fork_on_the_same_file_system_costs_no_bytes_and_no_write_reaches_its_parent(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    parent = parent_with(store, 1, tmp_path)
    fork = fork_run(fork_config(store, "base", "wide", 1))
    files = [model_location(run.checkpoint(1).location).local_path / "model.safetensors" for run in (parent, fork)]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    model_location(fork.checkpoint(1).location).write("model.safetensors", b"changed in the fork")
    assert files[0].read_bytes() == b"weights 1"


@pytest.mark.parametrize("at", ["newest", "2"])
@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("became", ["trained on", "thinned out", "gone"])
def test_a_fork_is_asked_for_again_whatever_became_of_its_parent(
    tmp_path: Path, at: str, offline: bool, became: str
) -> None:
    store = str(tmp_path / "store")
    parent = parent_with(store, 2, tmp_path)

    def asked(at: str, **given: Any) -> RunConfig:
        if offline:
            return offline_config(store, "base", "wide", ["night"], at=at, overrides=["offline.epochs=3"], **given)
        return fork_config(store, "base", "wide", int(at) if at.isdecimal() else None, ["rollout.group_size=16"])

    config = asked(at)
    fork = fork_run(config)
    publish(parent, trained(parent, 3, model_directory(tmp_path / "3", b"weights 3")))
    if became == "thinned out":
        assert retain(parent, 3) == [1, 2]
    elif became == "gone":
        delete_run(parent)
    assert asked(at) == config
    assert fork_run(asked(at)).uid == fork.uid
    with pytest.raises((ConfigError, StoreError), match=r"not from resume.path|No run 'base'"):
        fork_run(asked("3"))
    if offline:
        with pytest.raises(ConfigError, match=r"another configuration:\n.*train\.algorithm"):
            fork_run(asked(at, method="sft"))


def test_a_fork_whose_parent_lost_the_version_before_it_was_taken_says_so(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    parent = parent_with(store, 3, tmp_path)
    fork = open_run(fork_config(store, "base", "wide", 1))
    retain(parent, 3)
    with pytest.raises(StoreError, match="000001 has no manifest"):
        starting_policy(fork)
    with pytest.raises(StoreError, match=r"Run 'base' has no checkpoint of version 1. It has: 0, 3"):
        fork_config(store, "base", "other", 1)


def test_a_fork_may_change_everything_but_the_policy_that_the_checkpoint_holds(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    parent_with(store, 1, tmp_path)
    changes = [
        "seed=7",
        "environment.kind=sort",
        "train.optimizer.learning_rate=1e-5",
        "rollout.prompts_per_iteration=3",
    ]
    assert fork_run(fork_config(store, "base", "other-task", 1, changes)).config.seed == 7
    for change in ("policy.hidden_size=96", "train.lora.rank=4"):
        with pytest.raises(ConfigError, match=f"{change.split('=')[0]}.*->"):
            fork_run(fork_config(store, "base", "other-policy", 1, [change]))
    with pytest.raises(ConfigError, match="nothing is left to train"):
        fork_config(store, "base", "short", 1, ["iterations=1"])


def test_resume_disable_refuses_a_run_that_exists_but_not_its_own_later_stages(tmp_path: Path) -> None:
    config = settings(str(tmp_path / "store"), resume={"mode": "disable"})
    run = open_run(config, first_start=True)
    assert open_run(config).uid == run.uid, "a stage of the same start"
    with pytest.raises(ConfigError, match="is 'disable'"):
        open_run(config, first_start=True)
    assert open_run(settings(config.store), first_start=True).uid == run.uid, "auto continues it"


def test_resume_from_path_begins_there_once_and_continues_afterwards(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    parent = parent_with(store, 2, tmp_path)
    resume = {"mode": "from_path", "path": f"{store}/runs/base/checkpoints/000002"}
    config = settings(str(tmp_path / "elsewhere"), run_id="next", resume=resume)
    run = open_run(config, first_start=True)
    assert starting_policy(run).policy_version == 2
    assert model_location(run.checkpoint(2).location).read("model.safetensors") == b"weights 2"
    assert open_run(config, first_start=True).uid == run.uid
    with pytest.raises(ConfigError, match=r"began from .*000002, not from resume.path"):
        open_run(settings(config.store, run_id="next", resume=resume | {"path": parent.checkpoint(1).location.uri}))


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ({"mode": "from_path"}, "no resume.path"),
        ({"mode": "auto", "path": "x"}, "a path goes with from_path"),
    ],
)
def test_a_resume_mode_and_its_path_come_together(resume: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings("store", resume=resume)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("models/base", "is not a checkpoint of a run"),
        ("store/runs/base/checkpoints/000009", "Versions there: 000000, 000001"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused_with_what_is_there(tmp_path: Path, path: str, message: str) -> None:
    parent_with(str(tmp_path / "store"), 1, tmp_path)
    resume = {"mode": "from_path", "path": str(tmp_path / path)}
    with pytest.raises(ConfigError, match=message):
        open_run(settings(str(tmp_path / "store"), run_id="next", resume=resume))
    assert not Location(str(tmp_path / "store")).exists("runs/next/run.json"), "nothing was created"


def test_a_fork_without_changes_trains_the_very_version_that_its_parent_trained(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    parent = test_train.make_run(store, tmp_path)
    base = starting_policy(parent)
    for iteration in (1, 2, 3):
        base = publish(
            parent,
            train_iteration(parent, iteration, test_train.sequences(parent, iteration), base, tmp_path / "cache"),
        )
    release_trainers()
    fork = fork_run(fork_config(store, "r", "fork", 2))
    start = starting_policy(fork)
    update = train_iteration(fork, 3, test_train.sequences(fork, 3), start, tmp_path / "cache")
    release_trainers()
    mine, parents = (
        {entry.path: entry.sha256 for entry in read_manifest(reference).model_files.named()}
        for reference in (publish(fork, update), base)
    )
    assert mine == parents, "weights and trainer state, byte for byte"
