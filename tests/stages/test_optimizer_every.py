"""With `checkpoint.optimizer_every`, versions in between hold weights alone, and a restart continues them byte for byte."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError
from roundhouse.stages import train as stage
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import Reference, publish, retain, skip_iteration
from roundhouse.stages.fork import fork_config, fork_run
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import Run, Skip, open_run, trained_since_state
from roundhouse.store.stage import read_manifest
from roundhouse.store.verification import find_garbage, verify
from tests import fork_server
from tests.stages.test_train import checkpoint_digests, make_run, sequences

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_resident_trainer")]

SETTINGS = {"optimizer_every": 3, "keep_last": 1}


def run_at(place: Path, iterations: int = 30, **checkpoint: Any) -> Run:
    config = make_run(str(place), place.parent).config.model_dump(mode="json")
    return open_run(parse_config(config | {"checkpoint": SETTINGS | checkpoint, "iterations": iterations}))


def train(run: Run, until: int) -> Reference:
    """Train and publish the versions that are missing up to this one."""
    checkpoint = run.latest_checkpoint() or starting_policy(run)
    for iteration in range(checkpoint.policy_version + 1, until + 1):
        batch = run.stage(iteration, "validate").reference() or sequences(run, iteration)
        update = stage.train_iteration(run, iteration, batch, checkpoint, run.location.local_path.parent / "cache")
        checkpoint = publish(run, update)
    return checkpoint


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six versions, each with its optimizer's state, trained without a break."""
    run = run_at(tmp_path_factory.mktemp("full") / "store", optimizer_every=1)
    train(run, 6)
    trainer_home.release_trainers()
    return run


def files(run: Run, version: int) -> dict[str, str]:
    reference = run.checkpoint(version).reference()
    assert reference is not None
    return checkpoint_digests(reference)


def weights(files: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in files.items() if not name.startswith("trainer/")}


def metric(run: Run, iteration: int, name: str) -> float:
    update = run.stage(iteration, "train").reference()
    assert update is not None
    return read_manifest(update).metrics[f"train/{name}"]


KILLED = """
import os, signal, sys
from pathlib import Path
from roundhouse.training.trainer import Trainer
from tests.stages.test_optimizer_every import run_at, train

step = Trainer.step

def dies_in_iteration_6(self, batch, iteration, tolerances):
    report = step(self, batch, iteration, tolerances)
    if iteration == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return report

Trainer.step = dies_in_iteration_6
train(run_at(Path(sys.argv[1])), 6)
"""


def test_a_run_killed_between_two_states_ends_byte_for_byte_as_one_that_was_not(full: Run, tmp_path: Path) -> None:
    place = tmp_path / "store"
    killed = fork_server.run([sys.executable, "-c", KILLED, str(place)], check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    run = run_at(place)
    for version in (1, 2, 4, 5):
        assert files(run, version) == weights(files(full, version)), "weights alone"
    assert files(run, 3) == files(full, 3)
    train(run, 6)
    assert files(run, 6) == files(full, 6), "weights, moments and cursor"
    assert [metric(run, k, "retrained_iterations") for k in (3, 6)] == [0, 2]
    sizes = [metric(run, k, "checkpoint_bytes") for k in (5, 6)]
    assert sizes[0] < 0.4 * sizes[1], "two moments of each weight are left out"
    assert verify(str(place)).problems == []


def test_iterations_are_trained_again_with_the_settings_of_memory_that_they_had(tmp_path: Path) -> None:
    run = run_at(tmp_path / "store")
    train(run, 5)
    trainer_home.release_trainers()
    less = run.config.train.model_copy(update={"tokens_per_microbatch": 16})
    other = dataclasses.replace(run, config=run.config.model_copy(update={"train": less}))
    with pytest.raises(ConfigError, match=r"iteration 4, .* used train\.tokens_per_microbatch=4096\. Set this"):
        train(other, 6)


def test_a_state_that_is_reproduced_to_other_weights_is_refused_by_both_digests(tmp_path: Path) -> None:
    run = run_at(tmp_path / "store")
    reference = train(run, 5)
    trainer_home.release_trainers()
    manifest = read_manifest(reference)
    recorded = manifest.details["weights_digest"]
    changed = run.config.train.optimizer.model_copy(update={"learning_rate": 3.1e-4})
    other = run.config.model_copy(update={"train": run.config.train.model_copy(update={"optimizer": changed})})
    with pytest.raises(DataError, match=rf"iterations 4 to 5 again gave .* sha256:\w+, where {recorded} is recorded"):
        train(Run(run.location, other, run.uid, run.created_at, run.code_version), 6)
    assert run.stage(6, "train").reference() is None


def test_retention_keeps_the_state_of_a_version_that_it_keeps(tmp_path: Path) -> None:
    run = run_at(tmp_path / "store")
    train(run, 5)
    assert retain(run, 5) == [1, 2, 4]
    assert run.checkpoint_versions() == [0, 3, 5]
    assert find_garbage(run.config.store) == []
    train(run, 6)
    assert retain(run, 6) == [3, 5]


def test_a_restart_trains_again_what_versions_that_retention_deleted_had_learnt(full: Run, tmp_path: Path) -> None:
    run = run_at(tmp_path / "store")
    train(run, 5)
    assert retain(run, 5) == [1, 2, 4]
    trainer_home.release_trainers()
    train(run, 6)
    assert files(run, 6) == files(full, 6)
    assert metric(run, 6, "retrained_iterations") == 2


def test_the_last_version_has_its_state_and_a_skipped_iteration_is_not_trained_again(tmp_path: Path) -> None:
    run = run_at(tmp_path / "store", iterations=4)
    train(run, 1)
    second = skip_iteration(run, 2, Skip("x", "data", "because", "in a test"))
    origin, since = trained_since_state(second)
    assert (origin.policy_version, [sequences.iteration for sequences in since]) == (0, [1])
    trainer_home.release_trainers()
    train(run, 4)
    assert metric(run, 3, "retrained_iterations") == 1
    assert any(name.startswith("trainer/") for name in files(run, 4))


def test_a_fork_of_a_version_without_state_gets_it_and_needs_the_parent_no_more(full: Run, tmp_path: Path) -> None:
    run = run_at(tmp_path / "store")
    train(run, 5)
    trainer_home.release_trainers()
    fork = fork_run(fork_config(run.config.store, "r", "fork", 5))
    assert files(fork, 5) == files(full, 5)
    run.location.delete_tree()
    train(fork, 6)
    assert weights(files(fork, 6)) == weights(files(full, 6))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"train": {"service": {"kind": "process"}}}, "train.service.kind is process"),
        ({"placement": {"engine_sleeps": True}, "generation": {"backend": "transformers"}}, "gives its memory back"),
    ],
)
def test_a_trainer_that_is_loaded_for_each_step_needs_the_state_of_each_version(
    change: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.optimizer_every is 3, but .*{what}"):
        parse_config({"run_id": "r", "checkpoint": {"optimizer_every": 3}} | change)
