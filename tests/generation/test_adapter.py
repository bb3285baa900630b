from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig, OptimizerConfig, TrainConfig
from roundhouse.config.training import LoraConfig
from roundhouse.generation import deployment
from roundhouse.generation.deployment import ServeEndpoint
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.store.run import open_run
from roundhouse.store.stage import Reference
from roundhouse.training.trainer import Trainer
from roundhouse.weight_sync.replica_state import (
    TOLERANCE,
    RefitOptions,
    ReplicaReport,
    difference,
    proof_of,
    require_agreement,
)
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation.test_refit import assert_agrees, replies
from tests.stages.test_checkpoint import trained
from tests.training.tiny import sequences
from tests.weight_sync.publishing import published

pytestmark = pytest.mark.real

IDS = [5, 9, 33, 2, 7, 41, 8]


def _plain(directory: Path) -> list[float]:
    model: Any = Qwen3ForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        every = torch.log_softmax(model(torch.tensor([IDS])).logits[0], dim=-1)
    return [float(every[i, token]) for i, token in enumerate(IDS[1:])]


@pytest.mark.long
def test_vllm_serves_the_adapter_of_a_checkpoint_as_the_merged_model_says(tmp_path: Path) -> None:
    """The files under `trainer/` are an adapter that the engine loads on the starting policy."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=96, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "start")
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=0)
    lora = TrainConfig(lora=LoraConfig(rank=8), device="cpu", threads=1, minibatches=2, optimizer=optimizer)
    trainer = Trainer.load(tmp_path / "start", lora)
    trainer.step(sequences(), 1)
    trainer.save(tmp_path / "tuned")
    program = Path(__file__).with_name("adapter.py")
    alone = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    finished = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "start"), str(tmp_path / "tuned/trainer"), json.dumps(IDS)],
        env=os.environ | alone | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(finished.stdout.strip().splitlines()[-1])
    np.testing.assert_allclose(found["base"], _plain(tmp_path / "start"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["adapter"], _plain(tmp_path / "tuned"), rtol=0, atol=1e-4)
    assert np.abs(np.subtract(found["adapter"], found["base"])).max() > 0.1


def test_an_adapter_alone_travels_to_running_replicas_of_vllm_which_hold_the_merged_weights(
    deployed: ServeEndpoint, config: GenerationConfig, policies: dict[str, Path], bare: str, tmp_path: Path
) -> None:
    pytest.importorskip("roundhouse.plugins.adapter")
    engine = deployment.RayServeEngine(deployed)
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=0)
    lora = TrainConfig(lora=LoraConfig(rank=4), device="cpu", threads=1, optimizer=optimizer)
    trainer = Trainer.load(policies["first"], lora)
    tree = {"run_id": "r", "store": str(tmp_path / "store"), "train": {"lora": {"rank": 4}}}
    local = {"infra": {"state": str(tmp_path / "state")}, "generation": {"weight_sync": "adapter"}}
    run = open_run(parse_config(tree | local))
    checkpoints, directories = [publish_starting_policy(run, policies["first"], {})], [policies["first"]]
    for version in (1, 2):
        trainer.step(sequences(seed=version), version)
        trainer.save(tmp_path / f"v{version}")
        directories.append(tmp_path / f"v{version}")
        checkpoints.append(publish(run, trained(run, version, directories[-1])))

    def refitted(checkpoint: Reference) -> list[ReplicaReport]:
        with published(run, checkpoint) as found:
            assert found.source is not None
            options = RefitOptions(found.digest, found.source.model_dump())
            found = engine.ensure(config, bare, checkpoint.uri, checkpoint.policy_version, options)
        require_agreement(found, config.dtype)
        return found

    replicas = refitted(checkpoints[0])
    processes = {replica.pid for replica in replicas}
    for checkpoint, directory in zip(checkpoints[1:], directories[1:], strict=True):
        before, replicas = proof_of(replicas)["probe"], refitted(checkpoint)
        assert {replica.pid for replica in replicas} == processes
        assert [(replica.transport, replica.transport_note) for replica in replicas] == [("adapter", None)] * 2
        assert {replica.digest for replica in replicas} == {digest_of(directory)}
        assert difference(before, proof_of(replicas)["probe"]) > 10 * TOLERANCE[config.dtype]
        for completion in replies(deployed, config, 4):
            assert completion.policy_version == checkpoint.policy_version
            assert_agrees(directory, completion)
    read = engine.ensure(config, bare, str(directories[-1]), 3)
    assert {replica.transport for replica in read} == {"store"}
    require_agreement(read, config.dtype, proof_of(replicas))
