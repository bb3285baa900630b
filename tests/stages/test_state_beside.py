"""A version is published before its trainer's state is complete; a kill in between does not change the training."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.training import ProcessService
from roundhouse.errors import ConfigError, StoreError
from roundhouse.stages import train as stage
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import Reference, publish, retain
from roundhouse.stages.fork import fork_config, fork_run
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import Run, open_run, state_of, trained_since_state
from roundhouse.store.stage import ModelFiles, read_manifest
from roundhouse.store.verification import find_garbage, verify
from roundhouse.training.trainer import Trainer
from tests import fork_server
from tests.stages.test_optimizer_every import metric
from tests.stages.test_train import checkpoint_digests, make_run, sequences

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_resident_trainer")]


def run_at(store: str, tmp_path: Path, beside: int | None = 0, **train: Any) -> Run:
    config = make_run(f"{tmp_path}/template", tmp_path).config.model_dump(mode="json") | {"store": store}
    config["train"] |= train
    return open_run(parse_config(config | {"checkpoint": {"optimizer_beside_mib": beside, "keep_last": 1}}))


def train(run: Run, until: int, cache: Path) -> Reference:
    """Train and publish the missing versions up to this one, and delete those beyond retention."""
    checkpoint = run.latest_checkpoint() or starting_policy(run)
    for iteration in range(checkpoint.policy_version + 1, until + 1):
        batch = run.stage(iteration, "validate").reference() or sequences(run, iteration)
        checkpoint = publish(run, stage.train_iteration(run, iteration, batch, checkpoint, cache))
        retain(run, iteration)
    return checkpoint


def files(run: Run, version: int) -> dict[str, str]:
    """Weights and state, wherever each is."""
    checkpoint = run.checkpoint(version).reference()
    assert checkpoint is not None
    trainer_home.trainer_home(run).wait_for_state()
    state = state_of(checkpoint)
    assert state is not None
    return checkpoint_digests(checkpoint) | checkpoint_digests(state)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Version 4 of a run that wrote each state before its version."""
    place = tmp_path_factory.mktemp("undisturbed")
    run = run_at(str(place / "store"), place, beside=None)
    last = train(run, 4, place / "cache")
    trainer_home.release_trainers()
    assert state_of(last) == last
    return files(run, 4)


KILLED = """
import os, signal, sys, time
from pathlib import Path
from roundhouse.training.trainer import Trainer
from tests.stages.test_state_beside import run_at, train

uri, place, moment, version = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
run, store = run_at(uri, place), Trainer.store

def dies_with_its_state(self, location, attempt, *, state=True, weights=True):
    mine = not weights and self.cursor.iteration == version
    while mine and run.checkpoint(version).reference() is None:
        time.sleep(0.01)
    if mine and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    written = store(self, location, attempt, state=state, weights=weights)
    if mine:
        os.kill(os.getpid(), signal.SIGKILL)
    return written

Trainer.store = dies_with_its_state
train(run, 4, place / "cache")
"""


def killed(store: str, place: Path, moment: str, version: int) -> None:
    """Train until the state of a version is being written: until `before` or `after` its files are, which no manifest names."""
    arguments = [sys.executable, "-c", KILLED, store, str(place), moment, str(version)]
    ended = fork_server.run(arguments, check=False, env=dict(os.environ), capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_a_run_killed_between_weights_and_state_ends_byte_for_byte_as_one_that_was_not(
    moment: str, store_uri: str, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    killed(store_uri, tmp_path, moment, 2)
    run = run_at(store_uri, tmp_path)
    version = run.checkpoint(2).reference()
    assert version is not None
    assert state_of(version) is None
    assert [sequences.iteration for sequences in trained_since_state(version)[1]] == [2]
    assert find_garbage(store_uri) == [], "the state may just be being written"
    train(run, 4, tmp_path / "cache")
    assert metric(run, 3, "retrained_iterations") == 1
    assert files(run, 4) == undisturbed
    assert verify(store_uri).problems == []


def test_two_kills_in_a_row_find_the_way_back_to_the_last_state(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    store = str(tmp_path / "store")
    killed(store, tmp_path, "before", 2)
    killed(store, tmp_path, "before", 3)
    run = run_at(store, tmp_path)
    behind = run.checkpoint(1).reference()
    assert behind is not None
    if 2 in run.checkpoint_versions():  # the kill came before retention, which moves the pointer first
        run.point_to(behind)  # where both kills came right after a manifest, before the pointer was moved
        retain(run, 3)
    assert run.checkpoint_versions() == [0, 1, 3], "retention keeps the version that has the state"
    train(run, 4, tmp_path / "cache")
    assert metric(run, 4, "retrained_iterations") == 2
    assert files(run, 4) == undisturbed


def test_a_step_waits_for_the_state_of_the_version_before(
    tmp_path: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store, goes_on = run_at(str(tmp_path / "store"), tmp_path), Trainer.store, threading.Event()
    usual, wait = os.nice(0), trainer_home.TrainerHome.wait_for_state

    def released_after_a_while(home: trainer_home.TrainerHome) -> float:
        threading.Timer(0.5, goes_on.set).start()
        return wait(home)

    def waits(self: Trainer, *arguments: Any, weights: bool = True, **named: Any) -> ModelFiles:
        if not weights and self.cursor.iteration == 3:
            assert os.nice(0) > usual or usual == 19, "this thread's: refit and collection go before it"
            goes_on.wait(30)
        return store(self, *arguments, weights=weights, **named)

    monkeypatch.setattr(Trainer, "store", waits)
    newest = train(run, 3, tmp_path / "cache")
    assert state_of(newest) is None, "published without it"
    monkeypatch.setattr(trainer_home.TrainerHome, "wait_for_state", released_after_a_while)  # once the step is waiting
    train(run, 4, tmp_path / "cache")
    assert metric(run, 4, "state_wait_seconds") > 0.4
    assert files(run, 4) == undisturbed
    assert metric(run, 4, "retrained_iterations") == 0


def test_a_state_that_cannot_be_written_fails_the_next_step_which_makes_it_again(
    tmp_path: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = run_at(str(tmp_path / "store"), tmp_path), Trainer.store

    def fails(self: Trainer, *arguments: Any, weights: bool = True, **named: Any) -> ModelFiles:
        if not weights and self.cursor.iteration == 2:
            raise StoreError("the disk is full")
        return store(self, *arguments, weights=weights, **named)

    monkeypatch.setattr(Trainer, "store", fails)
    with pytest.raises(StoreError, match="the disk is full"):
        train(run, 4, tmp_path / "cache")
    assert run.latest_checkpoint() == run.checkpoint(2).reference()
    train(run, 4, tmp_path / "cache")
    assert metric(run, 3, "retrained_iterations") == 1
    assert files(run, 4) == undisturbed


def test_a_fork_and_a_step_as_a_process_find_the_state(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    run = run_at(str(tmp_path / "store"), tmp_path)
    train(run, 3, tmp_path / "cache")
    whole = files(run, 3)
    trainer_home.release_trainers()
    fork = fork_run(fork_config(run.config.store, "r", "fork", 3))
    adopted = fork.checkpoint(3).reference()
    assert adopted is not None
    assert checkpoint_digests(adopted) == whole, "in one checkpoint of its own"
    as_process = run.config.train.model_copy(update={"service": ProcessService()})
    config = run.config.model_copy(update={"train": as_process})
    train(Run(run.location, config, run.uid, run.created_at, run.code_version), 4, tmp_path / "cache")
    assert files(run, 4) == undisturbed


@pytest.mark.parametrize(
    ("beside", "change"),
    [
        (None, {}),
        (1, {}),
        (0, {"algorithm": {"kl_coefficient": 0.05, "reference_every": 1}}),
        (0, {"lora": {"rank": 2, "alpha": 4}}),
    ],
)
def test_a_state_that_is_small_or_needed_at_once_is_in_its_checkpoint(
    beside: int | None, change: dict[str, Any], tmp_path: Path
) -> None:
    run = run_at(str(tmp_path / "store"), tmp_path, beside, **change)
    first = train(run, 1, tmp_path / "cache")
    assert read_manifest(first).model_files.holds("trainer")


def test_a_trainer_that_another_run_of_the_step_would_not_equal_writes_its_state_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundhouse.training.service.engine import TrainEngine
    from roundhouse.training.service.verbs import ModelFacts

    facts = TrainEngine.facts
    monkeypatch.setattr(
        TrainEngine, "facts", lambda self: ModelFacts(facts(self).vocabulary, facts(self).positions, reproducible=False)
    )
    run = run_at(str(tmp_path / "store"), tmp_path)
    assert read_manifest(train(run, 1, tmp_path / "cache")).model_files.holds("trainer")


def test_a_size_below_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimizer_beside_mib"):
        parse_config({"run_id": "r", "checkpoint": {"optimizer_beside_mib": -1}})
