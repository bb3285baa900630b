"""The train stage on a real, tiny policy: what a fresh process continues from the store is what a resident one would do."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.stages import train as stage
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import engine_files, starting_policy, vocabulary_size
from roundhouse.stages.train import train_iteration
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.trajectories.schemas import SEQUENCES


def make_run(store: str, tmp_path: Path, run_id: str = "r") -> Run:
    tree = {
        "run_id": run_id,
        "store": store,
        "policy": {"kind": "warm_start", "steps": 3, "hidden_size": 32, "intermediate_size": 64, "layers": 1},
        "rollout": {"tasks": 2, "group_size": 4},
        "train": {"updates": 2},
        "infra": {"kind": "local", "state": str(tmp_path / "state")},
    }
    return open_run(parse_config(tree))


def sequences(run: Run, iteration: int) -> Reference:
    """A validate stage with made-up tokens: eight sequences in two groups, rewards mixed."""
    draw = random.Random(iteration)
    rows = []
    for group in range(2):
        for sample in range(4):
            generated = draw.randint(3, 9)
            tokens = [draw.randrange(vocabulary_size(run)) for _ in range(5 + generated)]
            row = {
                "sequence_id": f"g{group}/{sample}/0",
                "rollout_id": f"g{group}/{sample}",
                "group_id": f"g{group}",
                "token_ids": tokens,
                "loss_mask": [0] * 5 + [1] * generated,
                "gen_logprobs": [0.0] * 5 + [-6.0] * generated,
                "policy_version": iteration - 1,
                "version_spans": [{"version": iteration - 1, "start": 5, "end": len(tokens)}],
                "reward": float(sample % 2),
                "truncated": False,
            }
            rows.append(row)
    attempt = run.begin(run.stage(iteration, "validate"), policy_version=iteration - 1)
    attempt.write_table("sequences", pa.Table.from_pylist(rows, schema=SEQUENCES))
    return attempt.commit()


def weights_digest(reference: Reference) -> str:
    [digest] = [entry.sha256 for entry in read_manifest(reference).files if entry.path == "model.safetensors"]
    return digest


def train_two(run: Run, tmp_path: Path, *, restart: bool) -> Reference:
    checkpoint = starting_policy(run)
    for iteration in (1, 2):
        if restart:
            stage._resident.clear()
        update = train_iteration(run, iteration, sequences(run, iteration), checkpoint, tmp_path / "cache")
        checkpoint = publish(run, update)
    return checkpoint


@pytest.fixture(autouse=True)
def no_resident_trainer():
    stage._resident.clear()
    yield
    stage._resident.clear()


def test_a_restart_between_iterations_changes_nothing(store_uri: str, tmp_path: Path) -> None:
    resident = train_two(make_run(f"{store_uri}/a", tmp_path), tmp_path, restart=False)
    restarted = train_two(make_run(f"{store_uri}/b", tmp_path), tmp_path, restart=True)
    start = make_run(f"{store_uri}/a", tmp_path).checkpoint(0).reference()
    assert weights_digest(resident) == weights_digest(restarted) != weights_digest(start)
    trainer_files = [entry for entry in read_manifest(resident).files if entry.path.startswith("trainer/")]
    assert trainer_files == [entry for entry in read_manifest(restarted).files if entry.path.startswith("trainer/")]


def test_a_step_records_its_columns_and_is_not_done_twice(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    checkpoint = starting_policy(run)
    batch = sequences(run, 1)
    update = train_iteration(run, 1, batch, checkpoint, tmp_path / "cache")
    assert train_iteration(run, 1, batch, checkpoint, tmp_path / "cache") == update
    columns = read_table(update, "columns")
    assert columns.num_rows == 8
    assert "advantage" in columns.column_names
    metrics = read_manifest(update).metrics
    assert metrics["train/num_updates"] == 2
    assert metrics["seconds/compute"] > 0


def test_the_engine_starts_with_the_tokenizer_that_the_policy_will_have(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "store"), tmp_path)
    before = engine_files(run)
    assert run.checkpoint(0).reference() is None
    names = {path.name for path in before.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    starting_policy(run)
    assert engine_files(run) == before, "the same directory, checked against the committed policy"
