"""Trainer and engine that hold memory in turns: a run with sleep is the run without, and no run leaves its engine asleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import DataError
from roundhouse.generation.deployment import Replica
from roundhouse.stages import train as train_stage
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import checkpoint_cache, starting_policy, vocabulary_size
from roundhouse.stages.refit import awake_at_end, engine_at, engine_service, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest, read_table
from tests.generation.test_standalone import engine_process


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with engine_process(OMP_NUM_THREADS="1") as url:
        yield url


def make_run(directory: Path, engine_url: str, run_id: str, *, sleeps: bool) -> Run:
    tree = {
        "run_id": run_id,
        "store": str(directory / "store"),
        "policy": {"kind": "warm_start", "steps": 3, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "generation": {
            "backend": "transformers",
            "engine_url": engine_url,
            "max_model_len": 256,
            "engine_args": {"max_num_seqs": 1},
            "sampling": {"max_new_tokens": 4},
        },
        "environment": {"kind": "sort"},
        "rollout": {"tasks": 2, "group_size": 2, "concurrency": 2},
        "train": {"threads": 1, "device": "cpu", "algorithm": {"kind": "cross_entropy", "include_truncated": True}},
        "evaluation": {"tasks": 1},
        "placement": {"engine_sleeps": sleeps},
        "infra": {"kind": "local", "state": str(directory / "state")},
    }
    return open_run(parse_config(tree))


def replica(run: Run) -> Replica:
    [found] = engine_service(run).replicas()
    return found


def sequences_of(run: Run, k: int, base: Reference) -> Reference:
    weights = refit_iteration(run, k, base)
    rollouts = collect_iteration(run, k, weights, engine_at(run, weights.policy_version))
    return validate_iteration(run, k, rollouts, vocabulary_size(run))


def iterate(run: Run, k: int, base: Reference) -> Reference:
    update = train_iteration(run, k, sequences_of(run, k, base), base, checkpoint_cache(run.config))
    assert (replica(run).asleep is not None) == run.config.placement.engine_sleeps
    assert bool(train_stage._resident) != run.config.placement.engine_sleeps, "in its turn alone it holds memory"
    return publish(run, update)


def weights(run: Run, version: int) -> dict[str, str]:
    files = read_manifest(run.checkpoint(version).reference()).files
    return {entry.path: entry.sha256 for entry in files if entry.path.endswith(".safetensors")}


def test_a_run_whose_engine_sleeps_makes_the_same_weights_and_is_evaluated_by_an_engine_that_is_awake(
    tmp_path: Path, engine_url: str
) -> None:
    made = {}
    for name, sleeps in (("awake", False), ("asleep", True)):
        run = make_run(tmp_path, engine_url, name, sleeps=sleeps)
        with awake_at_end(run):
            checkpoint = starting_policy(run)
            for k in (1, 2):
                checkpoint = iterate(run, k, checkpoint)
            evaluated = evaluate_version(run, 2, engine_at(run, 2))
        train_stage.release_trainer()
        assert replica(run).ready
        answers = read_table(evaluated, "turns").column("generation_token_ids").to_pylist()
        made[name] = (weights(run, 1), weights(run, 2), sorted(answers))
    assert made["asleep"] == made["awake"]
    assert len(made["awake"][1]) == 2, "model and optimizer"
    assert made["awake"][0] != made["awake"][1], "it trained"


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
