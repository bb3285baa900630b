"""A run's refits by each transport, against a real engine in a separate process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roundhouse.config.loading import parse_config
from roundhouse.config.training import LoraConfig, OptimizerConfig, TrainConfig
from roundhouse.generation.deployment import EngineGone, ProcessEngine
from roundhouse.stages import refit
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import engine_at, engine_service, ensure_version, refit_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.shared_memory import release_memory
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation import tiny
from tests.generation.test_standalone import engine_process
from tests.stages.test_checkpoint import trained
from tests.training.tiny import sequences

pytestmark = pytest.mark.real


def test_a_run_brings_its_engine_to_each_version_by_the_way_it_chose_and_records_the_proof(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["agent", "remote"])
def test_an_engine_that_agent_servers_ask_is_told_which_sampling_the_run_draws_with(tmp_path: Path, kind: str) -> None:
    environment = {"kind": kind, "url": "http://127.0.0.1:1", "train_tasks": "rows.jsonl"}
    keys = {
        "environment": environment,
        "evaluation": {"temperature": 0.0, "sets": {"cut": {"temperature": 0.7, "top_p": 0.5}, "same": {"tasks": 3}}},
        "generation": {"backend": "transformers", "sampling": {"temperature": 0.7}},
        "infra": {"state": str(tmp_path / "state")},
    }
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store"), **keys}))
    start = publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})
    asked: list[dict[str, Any]] = []

    class FakeEngine(ProcessEngine):
        def ensure(self, *arguments: Any) -> list[ReplicaReport]:
            asked.append(arguments[-1].changed())
            raise EngineGone("it is a fake")

    with pytest.raises(EngineGone):
        ensure_version(run, start, FakeEngine("http://127.0.0.1:1"))
    training = {"temperature": 0.7, "top_p": 1.0, "top_k": None}
    evaluations = [training | {"temperature": 0.0}, training | {"top_p": 0.5}]
    told = [training, *evaluations] if kind == "agent" else None
    assert [one.get("sampling") for one in asked] == [told]


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"keep_prefix_cache": True}, {"running": "continue", "keep_prefix_cache": True}),
        ({"inflight_requests": "restart"}, {"running": "restart"}),
        ({"weights_cache_gib": 7}, {}),
    ],
    ids=["keep_prefix_cache", "inflight_requests", "weights_cache_gib"],
)
def test_a_refit_asks_for_what_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: dict[str, Any], told: dict[str, Any]
) -> None:
    keys = {
        "asynchrony": {"mode": "batch-async", "staleness": 1},
        "generation": {"backend": "transformers"} | generation,
        "infra": {"state": str(tmp_path / "state")},
    }
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store"), **keys}))
    start = publish_starting_policy(run, tiny.make_model(tmp_path / "v0", seed=1), {})
    asked: list[dict[str, Any]] = []
    bounds: list[int] = []

    class FakeEngine(ProcessEngine):
        def ensure(self, *arguments: Any) -> list[ReplicaReport]:
            asked.append(arguments[-1].changed())
            raise EngineGone("it is a fake")

    def cache(place: Path, bound: int) -> NodeCache:
        bounds.append(bound)
        return NodeCache(place, bound)

    monkeypatch.setattr(refit, "NodeCache", cache)
    with pytest.raises(EngineGone):
        ensure_version(run, start, FakeEngine("http://127.0.0.1:1"))
    [found] = asked
    assert {key: found.get(key) for key in told} == told
    assert bounds == [generation.get("weights_cache_gib", 32) * 2**30]


def test_an_engine_that_holds_the_same_version_of_another_run_is_brought_to_this_runs(
    tmp_path: Path,
) -> None:
    with engine_process() as url:

        def begun(run_id: str, seed: int) -> Run:
            keys = {"backend": "transformers", "engine_url": url}
            config = {"run_id": run_id, "store": str(tmp_path / "store"), "infra": {"state": str(tmp_path / "state")}}
            run = open_run(parse_config({**config, "generation": keys}))
            if run.checkpoint(0).reference() is None:
                publish_starting_policy(run, tiny.make_model(tmp_path / f"policy{seed}", seed=seed), {})
            return run

        def held(run: Run) -> ReplicaReport:
            """Return the weights after the run was told that the engine answers with its version 0."""
            assert engine_at(run, 0) == url
            (replica,) = engine_service(run).replicas()
            assert (replica.policy_version, replica.weights) == (0, run.checkpoint(0).reference().uri)
            return replica

        mine = begun("mine", seed=1)
        first = held(mine)
        assert held(mine).desired == first.desired, "there is nothing to do"
        other = held(begun("other", seed=2))
        assert other.digest == digest_of(tmp_path / "policy2")
        assert held(mine).digest == first.digest == digest_of(tmp_path / "policy1")

        shutil.rmtree(tmp_path / "store/runs/mine")
        anew = held(begun("mine", seed=3))
        assert anew.weights == first.weights
        assert anew.digest == digest_of(tmp_path / "policy3")


def test_an_adapter_alone_travels_and_the_engine_holds_the_merged_weights_as_if_it_had_read_the_checkpoint(
    tmp_path: Path,
) -> None:
    start = tiny.make_model(tmp_path / "v0", seed=1)
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=0)
    config = TrainConfig(lora=LoraConfig(rank=4), device="cpu", threads=1, optimizer=optimizer)
    trainer = Trainer.load(start, config)
    for version in (1, 2):
        trainer.step(sequences(seed=version), version)
        trainer.save(tmp_path / f"v{version}")
    with engine_process(OMP_NUM_THREADS="1") as url:

        def run_by(way: str) -> Run:
            generation: dict[str, Any] = {"backend": "transformers", "engine_url": url, "weight_sync": way}
            keys = {
                "generation": generation,
                "train": {"lora": {"rank": 4}},
                "infra": {"state": str(tmp_path / "state")},
            }
            return open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store"), **keys}))

        run = run_by("adapter")
        checkpoints = [publish_starting_policy(run, start, {})]
        checkpoints += [publish(run, trained(run, version, tmp_path / f"v{version}")) for version in (1, 2)]
        probes = []
        for way, checkpoint in zip(("store", "adapter", "adapter"), checkpoints, strict=True):
            details = read_manifest(refit_iteration(run, checkpoint.policy_version + 1, checkpoint)).details
            assert [(one["way"], one["note"]) for one in details["replicas"]] == [(way, None)]
            assert details["proof"]["digest"] == digest_of(tmp_path / f"v{checkpoint.policy_version}")
            probes.append(details["proof"]["probe"])
        assert probes[0] != probes[1] != probes[2]
        ensure_version(run, checkpoints[1])
        (read,) = ensure_version(run_by("store"), checkpoints[2])
        assert (read.transport, read.probe) == ("store", probes[2])
