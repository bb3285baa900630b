"""The train stage with a critic: wherever the step runs, and whatever is killed, the store has the same policy and critic."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, model_location, read_manifest
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.server import build_app
from roundhouse.training.service.verbs import Gradient, ValueBatch
from tests.stages.test_train import checkpoint_digests, sequences
from tests.training.service.serving import listening, make_service

pytestmark = pytest.mark.usefixtures("no_resident_trainer")

CRITIC_FILES = {
    "trainer/critic/config.json",
    "trainer/critic/model.safetensors",
    "trainer/critic/trainer/optimizer.safetensors",
}


def make_run(
    store: Path, tmp_path: Path, *, critic: dict[str, Any] | None = None, every: int = 1, **changes: Any
) -> Run:
    algorithm = {"kind": "ppo", "critic": critic or {}}
    tree = {
        "run_id": "r",
        "store": str(store),
        "policy": {"kind": "warm_start", "steps": 3, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "rollout": {"prompts_per_iteration": 2, "group_size": 4},
        "train": {"minibatches": 2, "threads": 1, "device": "cpu", "algorithm": algorithm} | changes,
        "checkpoint": {"optimizer_every": every},
        "infra": {"kind": "local", "state": str(tmp_path / "state")},
        "validation": {"recompute_tolerance": None},  # the tokens are made up
    }
    return open_run(parse_config(tree))


def iterate(run: Run, tmp_path: Path, iteration: int, base: Reference) -> Reference:
    return publish(run, train_iteration(run, iteration, sequences(run, iteration), base, tmp_path / "cache"))


def two_iterations(run: Run, tmp_path: Path) -> Reference:
    checkpoint = starting_policy(run)
    for iteration in (1, 2):
        checkpoint = iterate(run, tmp_path, iteration, checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of a trainer that stays in this process."""
    place = tmp_path_factory.mktemp("resident")
    run = make_run(place / "store", place)
    two_iterations(run, place)
    trainer_home.release_trainers()
    return run


@pytest.fixture(scope="module")
def expected(resident: Run) -> dict[str, str]:
    """Output of that trainer."""
    checkpoint = resident.checkpoint(2).reference()
    assert checkpoint is not None
    digests = checkpoint_digests(checkpoint)
    assert digests.keys() >= CRITIC_FILES
    return digests


@pytest.mark.long
def test_a_process_a_step_writes_what_a_resident_trainer_writes(expected: dict[str, str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "process", tmp_path, service={"kind": "process"})
    assert checkpoint_digests(two_iterations(run, tmp_path)) == expected
    update = run.stage(2, "train").reference()
    assert update is not None
    assert {"train/value_loss", "train/explained_variance", "train/value_mean"} <= read_manifest(update).metrics.keys()


def test_a_server_writes_what_a_resident_trainer_writes_and_continues_what_it_has_written(
    resident: Run, expected: dict[str, str], tmp_path: Path
) -> None:
    start = model_location(resident.checkpoint(0).location).local_path
    with listening(build_app(make_service(start, tmp_path / "server"))) as url:
        run = make_run(tmp_path / "remote", tmp_path, service={"kind": "remote", "url": url})
        first = iterate(run, tmp_path, 1, starting_policy(run))
        trainer_home.release_trainers()
        assert checkpoint_digests(iterate(run, tmp_path, 2, first)) == expected
        trainer_home.release_trainers()


def killed_in_the_critics_second_update(run: Run, base: Reference, batch: Reference, cache: Path) -> None:
    """A kill in iteration 2, after the policy's updates."""
    calls, learn = [0], TrainEngine.value_backward

    def struck(self: TrainEngine, batch: ValueBatch) -> Gradient:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return learn(self, batch)

    TrainEngine.value_backward = struck  # type: ignore[method-assign]
    train_iteration(run, 2, batch, base, cache)


@pytest.mark.real
def test_a_run_that_was_killed_in_iteration_2_continues_with_the_same_bytes(
    expected: dict[str, str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "killed", tmp_path)
    base, batch = iterate(run, tmp_path, 1, starting_policy(run)), sequences(run, 2)
    trainer_home.release_trainers()
    child = multiprocessing.get_context("spawn").Process(
        target=killed_in_the_critics_second_update, args=(run, base, batch, tmp_path / "cache")
    )
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert run.stage(2, "train").reference() is None
    update = train_iteration(run, 2, batch, base, tmp_path / "cache")
    assert checkpoint_digests(publish(run, update)) == expected


def test_versions_without_the_trainers_state_are_trained_again_with_their_critic(
    expected: dict[str, str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "sparse", tmp_path, every=2)
    base = iterate(run, tmp_path, 1, starting_policy(run))
    assert not any(name.startswith("trainer/") for name in checkpoint_digests(base))
    trainer_home.release_trainers()
    assert checkpoint_digests(iterate(run, tmp_path, 2, base)) == expected


def test_the_critic_of_a_run_begins_from_the_model_that_is_named(
    resident: Run, expected: dict[str, str], tmp_path: Path
) -> None:
    start = model_location(resident.checkpoint(0).location).local_path
    named = make_run(tmp_path / "named", tmp_path, critic={"model": str(start)})
    assert checkpoint_digests(two_iterations(named, tmp_path)) == expected
    trainer_home.release_trainers()
    nowhere = make_run(tmp_path / "lost", tmp_path, critic={"model": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match=r"train.algorithm.critic.model: .*nowhere has no config.json"):
        two_iterations(nowhere, tmp_path)
