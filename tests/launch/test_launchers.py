"""Every launcher keeps the contract of `roundhouse.launch.base`: a report, the program's own error, or an end when told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

from roundhouse.collection.sharded_attempt import ShardedAttempt
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError
from roundhouse.infra import processes
from roundhouse.launch.base import Launcher, Program, Say, Stopped, open_launcher
from roundhouse.launch.subprocesses import SubprocessLauncher
from roundhouse.stages import train
from roundhouse.store.location import Location
from roundhouse.store.run import open_run
from roundhouse.training.service.job_entry import REPORT
from tests.launch.program import Does


def program(tmp_path: Path, does: str, **changes: object) -> Program:
    fields = {
        "what": "The test's program",
        "module": "tests.launch.program",
        "spec": Does(does=does),
        "place": Location((tmp_path / "place").as_uri()),
        "place_field": "place",
        "stage": "train",
        "timeout_seconds": 60.0,
        "timeout_key": "a.key",
    }
    return Program(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(params=["subprocess"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
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
    monkeypatch.setattr(train, "open_launcher", opened)
    monkeypatch.setattr(train, "trained_since_state", lambda base: (base, []))
    tree = {"run_id": "r", "store": str(tmp_path), "train": {"service": {"kind": "process", "launcher": name}}}
    with pytest.raises(InterruptedError):
        train._in_process(open_run(parse_config(tree)), 1, mock.Mock(), mock.Mock(), tmp_path, print, "1")
    assert opened.call_args.args[0] == name


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({"launcher": "slurm"}, "'slurm' is no launcher. Set it to subprocess, kubernetes, or module:Class"),
        ({"launcher": "kubernetes"}, "train.service.launcher is kubernetes, but infra.kind is local"),
    ],
)
def test_a_launcher_that_cannot_work_is_refused_at_load(service: dict[str, str], said: str, tmp_path: Path) -> None:
    tree = {"run_id": "r", "store": str(tmp_path), "train": {"service": {"kind": "process", **service}}}
    with pytest.raises(ConfigError, match=said):
        parse_config(tree)
    tree = {"run_id": "r", "store": str(tmp_path), "rollout": {"distribution": {"kind": "process", **service}}}
    with pytest.raises(ConfigError, match=r"is no launcher|rollout.distribution.launcher is kubernetes"):
        parse_config(tree)


def test_a_class_that_is_no_launcher_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.service.launcher is 'pathlib:Path'.*no Launcher"):
        open_launcher("pathlib:Path", "train.service.launcher", None)
