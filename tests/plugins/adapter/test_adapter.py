"""The adapter alone reaches replicas, which hold the weights that the trainer published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.training import LoraConfig, OptimizerConfig, TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.adapter.transport import AdapterSource, merge
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import ensure_version, refit_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync.base import fetch_weights
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation import tiny
from tests.generation.test_standalone import engine_process
from tests.stages.test_checkpoint import trained
from tests.training.tiny import make_model, sequences


def test_the_merged_adapter_is_the_published_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "node", 10**9)
    start = make_model(tmp_path / "start")
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=0)
    config = TrainConfig(lora=LoraConfig(rank=4), device="cpu", threads=1, minibatches=2, optimizer=optimizer)
    trainer = Trainer.load(start, config)
    trainer.step(sequences(), 1)
    published = tmp_path / "published"
    trainer.save(published)
    way = AdapterSource(dtype="float32", base=str(start), uri=str(published / "trainer"))
    arrived = fetch_weights(str(published), way, digest_of(published), cache)
    assert (arrived.transport, arrived.note) == ("adapter", None)
    assert digest_of(published) != digest_of(start)
    other = make_model(tmp_path / "other", seed=5)
    wrong = fetch_weights(str(published), way.model_copy(update={"base": str(other)}), digest_of(published), cache)
    assert (wrong.transport, wrong.digest) == ("store", digest_of(published)), (
        "another base cannot give the wanted digest"
    )


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start", experts=4)
    lora = LoraConfig(rank=2, target_modules=("down_proj",))
    Trainer.load(model, TrainConfig(lora=lora, device="cpu", threads=1)).save(tmp_path / "saved")
    with pytest.raises(DataError, match=r"changes matrices of experts .* generation\.weight_sync=store"):
        merge(model, tmp_path / "saved/trainer", tmp_path, "float32")


def test_a_run_without_an_adapter_is_refused_when_its_configuration_is_read() -> None:
    with pytest.raises(ConfigError, match=r"train\.lora is not set"):
        parse_config({"run_id": "r", "generation": {"weight_sync": "adapter"}})


@pytest.mark.real
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
