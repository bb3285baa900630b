"""A run's refits by transports that are plug-ins, against a real engine in a separate process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roundhouse.config.loading import parse_config
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import ensure_version, refit_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation import tiny
from tests.generation.test_standalone import engine_process
from tests.stages.test_checkpoint import trained

pytestmark = pytest.mark.real


def test_a_run_brings_its_engine_to_each_version_by_the_way_it_chose_and_records_the_proof(tmp_path: Path) -> None:
    pytest.importorskip("roundhouse.plugins.delta")
    release_memory = pytest.importorskip("roundhouse.plugins.shared_memory.transport").release_memory
    with engine_process() as url:

        def run_by(way: str) -> Run:
            generation: dict[str, Any] = {"backend": "transformers", "engine_url": url, "weight_sync": way}
            config = {"run_id": "r", "store": str(tmp_path / "store"), "generation": generation}
            return open_run(parse_config({**config, "infra": {"state": str(tmp_path / "state")}}))

        run = run_by("store")
        checkpoints = [publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})]
        for version in (1, 2, 3):
            directory = tmp_path / f"v{version}"
            shutil.copytree(tmp_path / "v0", directory)
            tensors = load_file(directory / "model.safetensors")
            moved = {name: tensor * (1 + 1e-3 * version) for name, tensor in tensors.items()}
            save_file(moved, directory / "model.safetensors")
            checkpoints.append(publish(run, trained(run, version, directory)))
        for way, checkpoint in zip(("store", "delta", "shared-memory", "delta"), checkpoints, strict=True):
            stage = refit_iteration(run_by(way), checkpoint.policy_version + 1, checkpoint)
            details = read_manifest(stage).details
            assert [(one["way"], one["note"]) for one in details["replicas"]] == [(way, None)]
            assert details["proof"]["digest"] == digest_of(tmp_path / f"v{checkpoint.policy_version}")
            assert len(details["proof"]["probe"]) == 31
        (again,) = ensure_version(run_by("store"), checkpoints[0])
        assert (again.policy_version, again.transport) == (0, "store"), "held against the record, and found the same"
        release_memory()
