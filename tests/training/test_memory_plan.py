"""A memory plan counts what stays from the shapes, and finds what a pass takes without a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError
from roundhouse.training.memory_plan import USABLE, MemoryPlan, device_memory, plan_memory, remedies

SMALL = Qwen2Config(
    vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=1024, tie_word_embeddings=False,
)  # fmt: skip
LARGE = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    intermediate_size=28_672,
)  # fmt: skip


def plan(ranks: int = 1, tokens: int = 512, shape: Any = SMALL, **train: Any) -> MemoryPlan:
    return plan_memory(shape, TrainConfig.model_validate(train), ranks, tokens)


def test_what_stays_is_sixteen_bytes_a_parameter_and_four_for_a_reference() -> None:
    found = plan(algorithm={"kl_coefficient": 0.1})
    kept = {kind: found.bytes[kind] / found.parameters for kind in ("weights", "gradients", "moments", "reference")}
    assert kept == {"weights": 4, "gradients": 4, "moments": 8, "reference": 4}
    shared = plan(4)
    assert shared.bytes["weights"] == found.parameters
    assert shared.bytes["whole gradients"] == 4 * found.parameters
    assert "whole gradients" not in plan(4, reduce_gradients="microbatch").bytes
    assert plan(lora={"rank": 4}).bytes["moments"] < 0.1 * found.bytes["moments"]


def test_logits_are_those_of_a_chunk_and_recomputed_activations_are_a_layers() -> None:
    found = plan()
    logits = 512 * 4096 * 4
    assert 2 * logits <= found.bytes["logits"] <= 4 * logits
    chunked = plan(logits_chunk_tokens=64)
    assert chunked.bytes.get("logits", 0) <= found.bytes["logits"] // 4
    both = [plan(logits_chunk_tokens=64, activation_checkpointing=on).bytes["activations"] for on in (False, True)]
    assert both[1] < 0.5 * both[0]
    twice = [plan(tokens=tokens, logits_chunk_tokens=64).bytes["activations"] for tokens in (512, 1024)]
    assert twice[1] < 2.1 * twice[0], "linear in the tokens: attention keeps no square"


def test_seventy_billion_parameters_are_planned_and_made_to_fit() -> None:
    memory = USABLE * device_memory("h100")
    train = TrainConfig()
    assert plan(64, 4096, LARGE).total > memory
    found = remedies(LARGE, train, 64, 4096, memory)
    changed = train.model_copy(
        update={"dtype": "bfloat16", "logits_chunk_tokens": 1024, "activation_checkpointing": True}
        | {"reduce_gradients": "microbatch"}
    )
    assert found == [
        "train.dtype=bfloat16",
        "train.logits_chunk_tokens=1024",
        "train.activation_checkpointing=true",
        "train.reduce_gradients=microbatch",
    ]
    assert plan_memory(LARGE, changed, 64, 4096).total <= memory


def test_devices_are_named_as_people_name_them() -> None:
    assert device_memory("h100") == device_memory("NVIDIA H100 80GB HBM3") == 80e9
    assert device_memory("l40s") == 48e9
    assert device_memory("96GB") == 96e9
    with pytest.raises(ConfigError, match=r"--device tpu is not known. Known are h100, .* such as 96GB"):
        device_memory("tpu")


def test_doctor_refuses_a_model_that_does_not_fit_and_names_what_makes_it_fit(
    tmp_path: Path,
) -> None:
    SMALL.save_pretrained(tmp_path / "model")
    run = tmp_path / "run.yaml"
    run.write_text(f"run_id: r\nstore: {tmp_path}/store\npolicy: {{kind: pretrained, path: {tmp_path}/model}}\n")
    said = []
    for device in ("h100", "0.35GB"):
        result = CliRunner().invoke(app, ["doctor", str(run), "--device", device, "--state", str(tmp_path)])
        said.append(" ".join(result.output.split()))
    assert result.exit_code == 1
    assert "ok memory plan: 0.01 B parameters on 1 rank, microbatches of 4096 tokens" in said[0]
    assert "fail memory plan: does not fit" in said[1]
    assert "Set train.dtype=bfloat16, train.logits_chunk_tokens=1024" in said[1]
