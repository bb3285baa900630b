"""Permissions of each component's role in the bucket, tested with the names that the store and shard workers really use."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from roundhouse.store.location import Location
from roundhouse.store.stage import WRITERS, Provenance, Stage
from tests.k8s.validation import ROOT

OVERLAY = ROOT / "k8s/overlays/gpu"
COMPONENTS = ("flow", "trainer", "collector", "engine")
ARN = "arn:aws:s3:::your-bucket/roundhouse/"
READ, WRITE, DELETE = "s3:GetObject", "s3:PutObject", "s3:DeleteObject"


def may(component: str, action: str, name: str) -> bool:
    """Return IAM's decision: allowed by a statement and denied by none."""
    statements = json.loads((OVERLAY / f"bucket-policies/{component}.json").read_text())["Statement"]
    effects = {
        statement["Effect"]
        for statement in statements
        if action in statement["Action"] and any(fnmatchcase(ARN + name, each) for each in statement["Resource"])
    }
    return effects == {"Allow"}


def names_of_a_shard(directory: Path) -> list[str]:
    """Return the files of a shard's worker in a collect stage, relative to the store's root."""
    stage = Stage(
        Location(str(directory / "runs/r/iterations/000001/collect")), kind="collect", run_id="r", iteration=1
    )
    writer = stage.join(Provenance(policy_version=0, config_digest="", code_version="", seed=0), 2, "s0001of0004")
    for dataset in ("rollouts", "turns", "journal"):
        writer.write_table(dataset, pa.table({"a": [1]}))
    (stage.location / WRITERS / "s0001of0004-1-0123456789ab").write("report.json", b"{}")
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]


def test_a_collector_writes_its_shards_files_and_nothing_that_counts_for_others(tmp_path: Path) -> None:
    written = names_of_a_shard(tmp_path)
    assert len(written) == 5
    assert [name for name in written if not may("collector", WRITE, name)] == []
    assert [name for name in written if not may("collector", READ, name)] == []
    assert [name for name in written if may("collector", DELETE, name)] == [
        name for name in written if "/journal-" in name
    ]
    collect = "runs/r/iterations/000001/collect"
    for name in (
        "runs/r/run.json",
        f"{collect}/manifest.json",
        f"{collect}/attempt-0001.json",
        f"{collect}/writers/manifest.json",
        f"{collect}/rollouts-a0002-00000.parquet",
        "runs/r/iterations/000001/train/columns.parquet",
        "runs/r/checkpoints/000001/0001/model.safetensors",
        "datasets/d/1/rollouts-a0001-00000.parquet",
    ):
        assert not may("collector", WRITE, name), name
    assert may("collector", READ, "runs/r/checkpoints/000001/0001/tokenizer.json")


def test_an_engine_only_reads_weights() -> None:
    statements = json.loads((OVERLAY / "bucket-policies/engine.json").read_text())["Statement"]
    assert {action for each in statements for action in each["Action"]} == {READ, "s3:ListBucket"}
    assert may("engine", READ, "runs/r/checkpoints/000001/0001/model.safetensors")
    assert may("engine", READ, "runs/r/deltas/000001/delta.json")
    assert not may("engine", READ, "runs/r/iterations/000001/collect/rollouts-a0001-00000.parquet")


def test_a_trainer_writes_steps_and_checkpoints_and_commits_nothing() -> None:
    checkpoint = "runs/r/checkpoints/000001"
    assert may("trainer", READ, "runs/r/iterations/000001/validate/sequences-a0001-00000.parquet")
    assert may("trainer", WRITE, f"{checkpoint}/0001/model.safetensors")
    assert may("trainer", WRITE, "runs/r/iterations/000001/train/jobs/1/result.json")
    for name in ("runs/r/run.json", f"{checkpoint}/manifest.json", "runs/r/latest.json", "datasets/d/1/manifest.json"):
        assert not may("trainer", WRITE, name), name
    assert not may("trainer", WRITE, "runs/r/iterations/000001/collect/rollouts-a0001-00000.parquet")
    assert not may("trainer", DELETE, f"{checkpoint}/0001/model.safetensors")


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_account_has_a_role_of_its_own(component: str) -> None:
    accounts = list(yaml.safe_load_all((OVERLAY / "identity.yaml").read_text()))
    roles = {
        item["metadata"]["name"]: item["metadata"]["annotations"]["eks.amazonaws.com/role-arn"] for item in accounts
    }
    assert set(roles) == {f"roundhouse-{each}" for each in COMPONENTS}
    assert roles[f"roundhouse-{component}"].endswith(f":role/roundhouse-{component}")
    assert (OVERLAY / f"bucket-policies/{component}.json").exists()
