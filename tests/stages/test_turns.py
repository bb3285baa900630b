"""Trainer and engine that take turns with memory: a run with sleep equals the run without, and no run leaves its engine
asleep.

This also holds if Ray places both on one GPU, in a run started by a user. Ray gets a GPU that does not exist, and the
engine uses the processor instead (`declared_gpu/`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from roundhouse.config.loading import parse_config
from roundhouse.errors import DataError
from roundhouse.infra import services
from roundhouse.infra.services import Services
from roundhouse.stages import train as train_stage
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import awake_at_end, engine_at, engine_service, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest, read_table
from roundhouse.weight_sync.replica_state import ReplicaReport
from tests import fork_server
from tests.generation.test_standalone import engine_process

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TRAINER, REPLICA = ACTORS = ("TrainActor", "ServeReplica:policy:policy")


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with engine_process(OMP_NUM_THREADS="1") as url:
        yield url


def settings(directory: Path, run_id: str) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "iterations": 2,
        "store": str(directory / "store"),
        "policy": {"kind": "warm_start", "steps": 3, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "generation": {
            "backend": "transformers",
            "max_model_len": 256,
            "engine_args": {"max_num_seqs": 1},
            "sampling": {"max_new_tokens": 4},
        },
        "environment": {"kind": "sort"},
        "rollout": {"prompts_per_iteration": 2, "group_size": 2, "concurrency": 2},
        "train": {"threads": 1, "algorithm": {"kind": "cross_entropy", "include_truncated": True}},
        "evaluation": {"tasks": 1},
        "infra": {"kind": "local", "state": str(directory / "state")},
    }


def make_run(directory: Path, engine_url: str, run_id: str, *, sleeps: bool) -> Run:
    tree = settings(directory, run_id)
    tree["generation"] |= {"engine_url": engine_url}
    tree["train"] |= {"device": "cpu"}
    return open_run(parse_config(tree | {"placement": {"engine_sleeps": sleeps}}))


def replica(run: Run) -> ReplicaReport:
    [found] = engine_service(run).replicas()
    return found


def sequences_of(run: Run, k: int, base: Reference) -> Reference:
    weights = refit_iteration(run, k, base)
    rollouts = collect_iteration(run, k, weights, engine_at(run, weights.policy_version))
    return validate_iteration(run, k, rollouts, vocabulary_size(run))


def iterate(run: Run, k: int, base: Reference) -> Reference:
    update = train_iteration(run, k, sequences_of(run, k, base), base, checkpoint_cache(run.config))
    assert (replica(run).asleep is not None) == run.config.placement.engine_sleeps
    assert (trainer_home.trainer_home(run).trainer is not None) != run.config.placement.engine_sleeps, (
        "in its turn alone it holds memory"
    )
    return publish(run, update)


def weights(run: Run, version: int) -> dict[str, str]:
    files = read_manifest(run.checkpoint(version).reference()).model_files.by_name()
    return {name: entry.sha256 for name, entry in files.items() if name.endswith(".safetensors")}


def made_by(run: Run, evaluated: Reference) -> tuple[dict[str, str], dict[str, str], list[list[int]]]:
    """Return digests of both versions' files, and the answers of the second."""
    answers = read_table(evaluated, "turns").column("generation_token_ids").to_pylist()
    return weights(run, 1), weights(run, 2), sorted(answers)


def made_here(directory: Path, engine_url: str, name: str, *, sleeps: bool) -> tuple[Any, ...]:
    """Return the results of a run whose stages run in this process, with a separate engine."""
    run = make_run(directory, engine_url, name, sleeps=sleeps)
    with awake_at_end(run):
        checkpoint = starting_policy(run)
        for k in (1, 2):
            checkpoint = iterate(run, k, checkpoint)
        evaluated = evaluate_version(run, 2, engine_at(run, 2))
    trainer_home.release_trainers()
    assert replica(run).ready
    return made_by(run, evaluated)


@pytest.fixture(scope="module")
def awake(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Results of the run with an engine that never sleeps and a trainer that Ray does not place."""
    made = made_here(tmp_path_factory.mktemp("awake"), engine_url, "awake", sleeps=False)
    assert len(made[1]) == 2, "model and optimizer"
    assert made[0] != made[1], "it trained"
    return made


def test_a_run_whose_engine_sleeps_makes_the_same_weights_and_is_evaluated_by_an_engine_that_is_awake(
    tmp_path: Path, engine_url: str, awake: tuple[Any, ...]
) -> None:
    assert made_here(tmp_path, engine_url, "asleep", sleeps=True) == awake


@pytest.fixture
def with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """The local services with a Ray that declares one GPU."""
    paths = [str(Path(__file__).parent / "declared_gpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    state = tmp_path / "state" / "services"
    try:
        yield services.up(state, ("prefect", "ray"), arguments={"ray": ("--num-gpus", "1")})
    finally:
        services.down(state)


def told_by_ray(running: Services, table: str) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {running.ray_token}"}
    url = f"{running.ray_dashboard_url}/api/v0/{table}?detail=1"
    found: list[dict[str, Any]] = httpx.get(url, headers=headers, timeout=60).json()["data"]["result"]["result"]
    return found


@pytest.mark.long
def test_a_run_whose_trainer_ray_places_on_its_engines_gpu_takes_turns_with_it_and_makes_the_same_weights(
    tmp_path: Path, with_a_gpu: Services, awake: tuple[Any, ...]
) -> None:
    tree = settings(tmp_path, "placed") | {"placement": {"colocation": "gpu"}, "tracking": {"enabled": False}}
    tree["generation"] |= {"gpus_per_replica": 0.5}
    tree["train"] |= {"service": {"kind": "ray", "cpus": 0.2, "gpus": 0.4, "timeout_seconds": 240}}
    tree["evaluation"] |= {"before_training": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    command = [str(Path(sys.executable).with_name("roundhouse")), "train", str(tmp_path / "run.yaml")]
    done = fork_server.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    run = open_run(parse_config(tree))
    assert made_by(run, run.stage(2, "evaluate").reference()) == awake
    [reserved] = told_by_ray(with_a_gpu, "placement_groups")
    group = reserved["placement_group_id"]
    [bundle] = reserved["bundles"]
    assert bundle["unit_resources"]["GPU"] == 0.9
    actors = {name: [a for a in told_by_ray(with_a_gpu, "actors") if a["class_name"] == name] for name in ACTORS}
    assert [actor["state"] for actor in actors[TRAINER]] == ["DEAD", "DEAD"], "a trainer a turn"
    assert [actor["state"] for actor in actors[REPLICA]] == ["ALIVE"], "the engine was never started anew"
    for actor in (*actors[TRAINER], *actors[REPLICA]):
        assert (actor["placement_group_id"], actor["node_id"]) == (group, bundle["node_id"])
    for k in (1, 2):
        [refitted] = read_manifest(run.stage(k, "refit").reference()).details["replicas"]
        slept = read_manifest(run.stage(k, "train").reference()).details["asleep"]
        assert slept == [{"id": refitted["id"], "placement_group": group}]
    answer = httpx.get(f"{with_a_gpu.serve_url}/rh/status", timeout=30).json()
    assert (answer["ready"], answer["asleep"], answer["policy_version"]) == (True, None, 2)


def test_a_run_that_fails_while_its_engine_sleeps_leaves_it_awake(
    tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, engine_url, "fails", sleeps=True)
    base = starting_policy(run)
    given = sequences_of(run, 1, base)

    def damaged(*_: object) -> None:
        assert replica(run).asleep is not None
        raise DataError("The disk is gone.")

    monkeypatch.setattr(train_stage, "_in_service", damaged)
    with pytest.raises(DataError, match="disk is gone"), awake_at_end(run):
        train_iteration(run, 1, given, base, checkpoint_cache(run.config))
    found = replica(run)
    assert (found.ready, found.asleep, found.policy_version) == (True, None, 0)
