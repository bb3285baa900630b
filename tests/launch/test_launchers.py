"""Every launcher keeps the contract of `roundhouse.launch.base`: a report, the program's own error, or an end on request."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from ray.exceptions import RayError

from roundhouse.collection.sharded_attempt import ShardedAttempt
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.infra import processes
from roundhouse.launch import ray_actors
from roundhouse.launch.base import Launcher, Program, Say, Stopped, open_launcher
from roundhouse.launch.subprocesses import SubprocessLauncher
from roundhouse.stages import train_program
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.training.service.job_entry import REPORT
from tests.launch.program import Does
from tests.waiting import until

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def program(tmp_path: Path, does: str, **changes: object) -> Program:
    fields = {
        "what": "The test's program",
        "module": "tests.launch.program",
        "spec": Does(does=does),
        "place": Location((tmp_path / "place").as_uri()),
        "place_field": "place",
        "stage": "train",
        "timeout_seconds": 240.0,
        "timeout_key": "a.key",
        "environment": {"PYTHONPATH": str(ROOT)},
    }
    return Program(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(params=["subprocess", "ray"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with open_launcher(request.param, "train.service.launcher", None) as found:
        yield found


def of_programs() -> list[psutil.Process]:
    def is_one(process: psutil.Process) -> bool:
        try:
            return process.environ().get(processes.MARK, "").startswith("program-")
        except psutil.Error:
            return False

    return [child for child in psutil.Process().children(recursive=True) if is_one(child)]


def test_a_program_is_run_to_its_end_and_heard(launcher: Launcher, tmp_path: Path) -> None:
    said: list[str] = []
    place = launcher.run(program(tmp_path, "report"), said.append, threading.Event())
    assert place.read(REPORT) == b"{}"
    assert "rank 0 of 1" in said
    assert of_programs() == []


def test_the_error_of_a_program_is_raised_as_it_was_there(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data is bad"):
        launcher.run(program(tmp_path, "refuse"), lambda line: None, threading.Event())


def test_a_program_that_is_not_wanted_any_more_is_ended_with_all_that_it_started(
    launcher: Launcher, tmp_path: Path
) -> None:
    stopped = threading.Event()
    with pytest.raises(Stopped):
        launcher.run(program(tmp_path, "wait"), lambda line: stopped.set(), stopped)
    assert of_programs() == []


def test_what_the_launchers_of_killed_processes_left_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_launcher("subprocess", "a.key", None):
        (held,) = tmp_path.iterdir()
        own = held.name.rpartition("-")[0]
        left, new, elsewhere = (tmp_path / name for name in (f"{own}-left", f"{own}-new", "roundhouse-launch-far-left"))
        for path in (left, new, elsewhere):
            (path / "cache").mkdir(parents=True)
        for path in (held, left, elsewhere):
            os.utime(path, (1, 1))
        with open_launcher("subprocess", "a.key", None):
            pass
        assert set(tmp_path.iterdir()) == {held, new, elsewhere}


class OwnLauncher(SubprocessLauncher):
    """A user's: it prepares the program and has it done right here."""

    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        program.prepare()
        program.place.write(REPORT, b"own")
        return program.place


def test_a_run_may_name_a_launcher_of_its_own(tmp_path: Path) -> None:
    name = "tests.launch.test_launchers:OwnLauncher"
    tree = {
        "run_id": "r",
        "store": str(tmp_path / "store"),
        "rollout": {"distribution": {"kind": "process", "shards": 2, "launcher": name}},
        "train": {"service": {"kind": "process", "launcher": name}},
    }
    run = open_run(parse_config(tree))
    with ShardedAttempt(run, run.stage(1, "collect"), 0).open_launcher([]) as found:
        assert type(found).__name__ == "OwnLauncher"
        place = found.run(program(tmp_path, "wait"), print, threading.Event())
    assert place.read(REPORT) == b"own"


def test_a_step_is_started_by_the_launcher_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, opened = "tests.launch.test_launchers:OwnLauncher", mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(train_program, "open_launcher", opened)
    monkeypatch.setattr(train_program, "trained_since_state", lambda base: (base, []))
    tree = {"run_id": "r", "store": str(tmp_path), "train": {"service": {"kind": "process", "launcher": name}}}
    with pytest.raises(InterruptedError):
        train_program.run_step(open_run(parse_config(tree)), 1, mock.Mock(), mock.Mock(), tmp_path, print, "1")
    assert opened.call_args.args[0] == name


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({"launcher": "slurm"}, "'slurm' is not a launcher. Set it to subprocess, ray, kubernetes, or module:Class"),
        ({"launcher": "kubernetes"}, "train.service.launcher is kubernetes, but infra.kind is local"),
    ],
)
def test_a_launcher_that_cannot_work_is_refused_at_load(service: dict[str, str], said: str, tmp_path: Path) -> None:
    tree = {"run_id": "r", "store": str(tmp_path), "train": {"service": {"kind": "process", **service}}}
    with pytest.raises(ConfigError, match=said):
        parse_config(tree)
    tree = {"run_id": "r", "store": str(tmp_path), "rollout": {"distribution": {"kind": "process", **service}}}
    with pytest.raises(ConfigError, match=r"is not a launcher|rollout.distribution.launcher is kubernetes"):
        parse_config(tree)


def test_a_class_that_is_no_launcher_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.service.launcher is 'pathlib:Path'.*no Launcher"):
        open_launcher("pathlib:Path", "train.service.launcher", None)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {"infra": {"ray": {"trainer": {"gpus": 1}}}, "train": {"service": {"processes": 2}}},
            "infra.ray.trainer.gpus is 1, but train.service.processes is 2",
        ),
        (
            {"infra": {"kind": "kubernetes"}, "store": "s3://b/s"},
            "train.service.launcher is ray, but infra.kind is kubernetes",
        ),
    ],
)
def test_a_ray_cluster_that_cannot_do_it_is_refused_at_load(tree: dict[str, Any], said: str, tmp_path: Path) -> None:
    service = {"kind": "process", "launcher": "ray", **tree.get("train", {}).get("service", {})}
    with pytest.raises(ConfigError, match=said):
        parse_config({"run_id": "r", "store": str(tmp_path), **tree, "train": {"service": service}})


def on_ray(tmp_path: Path, **sections: Any) -> Run:
    """A run with Ray's launcher."""
    processes = max(1, int(sections.get("trainer", {}).get("gpus", 1)))
    train = {"service": {"kind": "process", "launcher": "ray", "processes": processes}}
    tree = {"run_id": "r", "store": str(tmp_path / "store"), "infra": {"ray": sections}, "train": train}
    return open_run(parse_config(tree))


@pytest.mark.parametrize(("stage", "key"), [("train", "trainer"), ("collect", "collector")])
def test_a_program_that_no_node_has_room_for_ends_at_its_time_limit_and_names_what_it_waited_for(
    ray_cluster: None, tmp_path: Path, stage: str, key: str
) -> None:
    waiting = program(tmp_path, "report", stage=stage, timeout_seconds=0.5)
    with (
        open_launcher("ray", "a.key", on_ray(tmp_path, **{key: {"cpus": 64, "gpus": 2}})) as launcher,
        pytest.raises(InfraError, match=r"a\.key.*64 CPUs and 2 GPUs on a node.*nothing: has the cluster"),
    ):
        launcher.run(waiting, lambda line: None, threading.Event())


@pytest.mark.parametrize(("stage", "section"), [("train", {"trainer": {"nodes": 2}}), ("collect", {"collector": {}})])
def test_a_program_reserves_what_the_section_of_its_stage_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, section: dict[str, Any]
) -> None:
    cluster, group = mock.Mock(), mock.Mock()
    cluster.remote.return_value.options.side_effect = RayError("as far as this test goes")
    for name, each in (("join_cluster", mock.Mock()), ("ray", cluster), ("placement_group", group)):
        monkeypatch.setattr(ray_actors, name, each)
    monkeypatch.setattr(ray_actors, "PlacementGroupSchedulingStrategy", mock.Mock())
    monkeypatch.setattr(ray_actors, "remove_placement_group", mock.Mock())
    keys = {name: {"cpus": 64, "gpus": 2, **given} for name, given in section.items()}
    with (
        pytest.raises(RayError, match="as far as"),
        open_launcher("ray", "a.key", on_ray(tmp_path, **keys)) as launcher,
    ):
        launcher.run(program(tmp_path, "wait", stage=stage), print, threading.Event())
    asked = cluster.remote.return_value.options.call_args.kwargs
    assert (asked["num_cpus"], asked["num_gpus"]) == (64, 2)
    assert [call.args[0] for call in group.call_args_list] == (
        [[{"CPU": 64, "GPU": 2}] * 2] if stage == "train" else []
    )


def test_a_cluster_with_too_few_nodes_is_named(ray_cluster: None, tmp_path: Path) -> None:
    with (
        open_launcher("ray", "a.key", on_ray(tmp_path, trainer={"nodes": 2})) as launcher,
        pytest.raises(InfraError, match=r"a\.key.*1 CPUs and 0 GPUs on each of 2 nodes.*nothing: has the cluster"),
    ):
        launcher.run(program(tmp_path, "report", timeout_seconds=0.5), lambda line: None, threading.Event())


def test_a_program_that_is_lost_with_its_actor_is_an_infrastructure_error_and_leaves_nothing(
    ray_cluster: None, tmp_path: Path
) -> None:
    def kill_actor(line: str) -> None:
        if line.startswith("rank"):
            parents = (parent for child in of_programs() for parent in child.parents())
            next(parent for parent in parents if "ProgramHost" in " ".join(parent.cmdline())).kill()

    with (
        open_launcher("ray", "a.key", on_ray(tmp_path)) as launcher,
        pytest.raises(InfraError, match="was lost with its Ray actor"),
    ):
        launcher.run(program(tmp_path, "wait"), kill_actor, threading.Event())
    until(lambda: of_programs() == [])


def test_the_cluster_that_is_joined_is_the_configured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[str | None, str]] = []
    monkeypatch.setattr(ray_actors, "join_cluster", lambda address, key: joined.append((address, key)))
    open_launcher("ray", "a.key", on_ray(tmp_path, address="10.0.0.1:6379"))
    assert joined == [("10.0.0.1:6379", "infra.ray.address")]


def test_a_cluster_that_does_not_answer_is_an_infrastructure_error_with_its_key(tmp_path: Path) -> None:
    """In a separate process: this one is a driver of the other tests' cluster."""
    attempt = """
import sys
from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError
from roundhouse.launch.base import open_launcher
from roundhouse.store.run import open_run
run = open_run(parse_config({"run_id": "r", "store": sys.argv[1], "infra": {"ray": {"address": "127.0.0.1:1"}}}))
try:
    open_launcher("ray", "a.key", run)
except InfraError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", attempt, str(tmp_path)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert "infra.ray.address: 127.0.0.1:1) cannot be joined" in ended.stdout, ended.stderr
