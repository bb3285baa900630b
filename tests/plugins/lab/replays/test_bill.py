"""Each token that was generated stands on the bill once, through forks, replays, re-scoring and branches, and each CPU second
of drivers and their programs, of killed ones too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.cpu import take_seconds
from roundhouse.launch.base import Stopped
from roundhouse.launch.subprocesses import ChildProcess
from roundhouse.plugins.lab.replays import replay, rescore
from roundhouse.plugins.lab.replays.branches import commit_branch
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.cost import bill_of
from roundhouse.stages.policy import starting_policy
from roundhouse.store.lease import driving
from roundhouse.store.location import Location
from roundhouse.store.run import Run, load_run, open_run
from roundhouse.store.stage import Stage, read_manifest
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.plugins.lab.replays import planted
from tests.plugins.lab.replays.killed_driver import drive
from tests.plugins.lab.replays.trained import own_samples
from tests.stages.offline_world import make_config

pytestmark = pytest.mark.real

FORKED = planted.Plant("forked", since=3, until=3, forked=planted.optimizer(learning_rate=0.02))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, int]]:
    """A fork of three iterations with the tokens that the engine counted, by run."""
    counters: dict[str, int] = {}
    draw = planted.drawn

    def counting(run: Run, *arguments: object) -> list[Rollout]:
        made = draw(run, *arguments)  # type: ignore[arg-type]
        counters[run.run_id] = counters.get(run.run_id, 0) + sum(
            len(each.turns[0].generation_token_ids) for each in made
        )
        if arguments[1] == "train":  # one rollout of an iteration has failed
            made[0] = replace(made[0], status=Status.FAILED, reward=None, failure_code="tool_timeout")
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "drawn", counting)
        run = planted.planted_run(tmp_path_factory.mktemp("bill"), FORKED, iterations=4)
    return run, counters


def test_the_bill_of_run_and_fork_is_what_the_engine_counted(counted: tuple[Run, dict[str, int]]) -> None:
    run, counters = counted
    parent = load_run(run.config.store, "planted")
    for each in (run, parent):
        bill = bill_of(each)
        assert sum(bill["tokens"].values()) == counters[each.run_id]
        assert bill["tokens"]["failed"] == 4 * 2, "the failed rollout of each of two iterations"
        assert bill["tokens"]["trained"] > 0
        recorded = sum(
            read_manifest(stage).resources["cpu_seconds"]
            for k in range(each.first_version, each.first_version + 3)
            for kind in ("collect", "validate", "train", "evaluate")
            if (stage := each.stage(k, kind).reference()) is not None
        )
        checkpoints = [each.checkpoint(version).reference() for version in each.checkpoint_versions()]
        recorded += sum(read_manifest(found).resources["cpu_seconds"] for found in checkpoints if found is not None)
        assert sum(bill["cpu_seconds"].values()) == pytest.approx(recorded)


def test_what_copies_rows_adds_no_token_and_what_samples_adds_its_own(counted: tuple[Run, dict[str, int]]) -> None:
    run, _ = counted
    before = bill_of(run)
    replay(run.config.store, run.run_id, [3], name="again")
    rescore(run.config.store, run.run_id, "judged", iterations=range(3, 4))
    collection = run.stage(3, "collect").reference()
    checkpoint = run.checkpoint(3).reference()
    assert collection is not None
    assert checkpoint is not None
    stored = [each for each in read_rollouts(collection) if each.status is Status.COMPLETED][:2]
    made = [replace(each, turns=[*each.turns, replace(each.turns[0], turn=1, parent=0)]) for each in stored]
    for each in made:
        each.turns[0] = replace(each.turns[0], trained=False)
    place = Stage(Location(run.config.store) / "datasets/branches/one", kind="collect", run_id=run.run_id, iteration=3)
    commit_branch(run, place, checkpoint, collection, made, {"turn": 1})
    after = bill_of(run)
    assert after["tokens"] == before["tokens"] | {"branched": 2 * 4}
    assert after["cpu_seconds"]["replayed"] > 0
    assert {"judged", "branched"} <= after["cpu_seconds"].keys()
    for cause, used in before["cpu_seconds"].items():
        assert after["cpu_seconds"][cause] == used


def test_the_command_shows_one_bill_or_that_of_all_runs(counted: tuple[Run, dict[str, int]]) -> None:
    run, counters = counted
    store = ["--store", run.config.store]
    one = CliRunner().invoke(app, ["runs", "cost", run.run_id, *store])
    assert one.exit_code == 0, one.output
    assert "trained: a step gave them weight" in " ".join(one.stdout.split())
    found = json.loads(CliRunner().invoke(app, ["runs", "cost", "--json", *store]).stdout)
    assert found["runs"].keys() == {"planted", "forked"}
    generated = sum(value for cause, value in found["total"]["tokens"].items() if cause != "branched")
    assert generated == sum(counters.values())
    by_team = json.loads(CliRunner().invoke(app, ["runs", "cost", "--by", "team", "--json", *store]).stdout)
    assert by_team["team"] == {"search": found["runs"]["forked"], "without team": found["runs"]["planted"]}
    assert by_team["total"] == found["total"]
    refused = CliRunner().invoke(app, ["runs", "cost", run.run_id, "--by", "team", *store])
    assert refused.exit_code != 0
    assert "Leave one of the two out" in " ".join(refused.output.split()) + str(refused.exception)


def cpu_seconds_of_a_killed_driver(config: Path, stage: str) -> float:
    """Return the CPU seconds of its process as a driver, by the system's account."""
    command = [sys.executable, "-m", "tests.plugins.lab.replays.killed_driver", str(config), stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        before = float(process.stdout.readline())
        assert process.stdout.readline() == "worked\n"
        os.kill(process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime - before


def test_what_killed_drivers_used_is_on_the_bill_once(tmp_path: Path) -> None:
    config = make_config(tmp_path, iterations=1)
    place = tmp_path / "config.json"
    place.write_text(config.model_dump_json())
    killed = sum(cpu_seconds_of_a_killed_driver(place, stage) for stage in ("collect", "train"))
    run = load_run(config.store, config.run_id)
    assert bill_of(run)["cpu_seconds"]["interrupted"] >= 2, "it is known before another driver has followed"
    before = time.process_time()
    with driving(run.location):
        drive(run)
    used = killed + time.process_time() - before
    bill = bill_of(run)["cpu_seconds"]
    assert bill["interrupted"] >= 2, "a second of work in each of the two attempts"
    lost = used - sum(bill.values())
    assert -0.1 < lost < 2 * 0.25, f"leases of a minute, and at most a tenth of a second is missing: {lost} of {used} s"


BURN = """
import subprocess, sys, time
if "child" in sys.argv:
    subprocess.Popen([sys.executable, *sys.orig_argv[1:-1]])  # in its session, and never waited for
while time.process_time() < 0.6:
    pass
print("burnt", flush=True)
time.sleep(0 if "ends" in sys.argv else 600)
"""
"""A program that uses as many CPU seconds as this, and its child too; then it ends or waits."""
BURNT, NOISE = 0.6, 0.15


@pytest.mark.parametrize(
    ("arguments", "ends_by", "processes", "cause"),
    [
        (["ends"], None, 1, "driver"),
        ([], signal.SIGKILL, 1, "interrupted"),
        (["child"], signal.SIGKILL, 2, "interrupted"),
        (["child"], "stopped", 2, "driver"),
    ],
    ids=["ends", "killed", "killed, its child not", "stopped"],
)
def test_cpu_seconds_of_a_program_are_on_the_bill_by_how_it_ended(
    tmp_path: Path, arguments: list[str], ends_by: object, processes: int, cause: str
) -> None:
    config = make_config(tmp_path, iterations=1)
    run, stopped, said = open_run(config), threading.Event(), list[str]()
    program = ChildProcess("The program", ["-c", BURN, *arguments], tmp_path / "log", 120, "a.key")

    def heard(line: str) -> None:
        said.append(line)
        if len(said) == processes and ends_by == "stopped":
            stopped.set()
        elif len(said) == processes and isinstance(ends_by, signal.Signals):
            children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
            [leader] = [each for each in children if "burnt" in " ".join(each.cmdline())]
            leader.send_signal(ends_by)

    with driving(run.location) as lease, contextlib.suppress(Stopped):
        before = time.process_time()
        lease.renew()
        bill = bill_of(run)["cpu_seconds"]
        code = program.run("train", heard, stopped)
        assert code == (0 if ends_by is None else -signal.SIGKILL)
    own = time.process_time() - before
    after = bill_of(run)["cpu_seconds"]
    used = after[cause] - (own + bill.get("pending", 0.0) if cause == "driver" else 0.0)
    assert used == pytest.approx(processes * BURNT, abs=processes * NOISE)
    assert take_seconds("train") == (0 if cause == "interrupted" else pytest.approx(used, abs=NOISE))
    assert take_seconds("train") == 0, "each second is given once"


def counted_stage(run: Run, kind: str, engine_tokens: dict[str, int], made: list[Rollout]) -> None:
    """Write a stage of the first iteration with these rollouts and final counters of the engine."""
    attempt = run.begin(run.stage(1, kind), policy_version=0)
    attempt.write_table("turns", turns_table(made))
    attempt.write_table("rollouts", rollouts_table(made))
    attempt.commit(details={"engine_tokens": engine_tokens})


@pytest.mark.parametrize(
    ("at_refit", "at_collect", "driver", "interrupted"),
    [
        ({"a": 0}, {"a": 64}, None, None),
        ({"a": 2}, {"a": 96}, 2, 30),
        ({"a": 2, "b": 1}, {"b": 11, "a": 76}, 3, 20),
        ({"a": 2}, {"b": 500}, 2, None),
        ({}, {}, None, None),
    ],
    ids=["all in rows", "some in none", "two replicas", "a replica that began anew", "an engine that does not count"],
)
def test_tokens_that_the_engine_counted_and_no_row_has_are_interrupted(
    tmp_path: Path,
    at_refit: dict[str, int],
    at_collect: dict[str, int],
    driver: int | None,
    interrupted: int | None,
) -> None:
    run = open_run(make_config(tmp_path, iterations=1))
    base = starting_policy(run)
    made = own_samples(run, base, 1, torch.Generator().manual_seed(0))
    assert sum(each.generated_tokens for each in made) == 64
    counted_stage(run, "refit", at_refit, [])
    counted_stage(run, "collect", at_collect, made)
    bill = bill_of(run)["tokens"]
    assert bill["pending"] == 64
    assert (bill.get("driver"), bill.get("interrupted")) == (driver, interrupted)


def test_no_token_is_called_interrupted_where_a_count_falls_into_another_stage(tmp_path: Path) -> None:
    run = open_run(make_config(tmp_path, iterations=1))
    base = starting_policy(run)
    made = own_samples(run, base, 1, torch.Generator().manual_seed(0))
    counted_stage(run, "refit", {"a": 0}, [])
    overlapped = run.begin(run.stage(1, "collect"), policy_version=0)
    counted_stage(run, "evaluate", {"a": 64}, [])  # of them, 64 are the collection's
    overlapped.write_table("turns", turns_table(made))
    overlapped.write_table("rollouts", rollouts_table(made))
    overlapped.commit(details={"engine_tokens": {"a": 64}})
    assert bill_of(run)["tokens"] == {"pending": 64, "evaluated": 0}
