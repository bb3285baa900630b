from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.config.training import LoraConfig
from roundhouse.training.trainer import Trainer
from tests.training.tiny import sequences

IDS = [5, 9, 33, 2, 7, 41, 8]


def _plain(directory: Path) -> list[float]:
    model: Any = Qwen3ForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        every = torch.log_softmax(model(torch.tensor([IDS])).logits[0], dim=-1)
    return [float(every[i, token]) for i, token in enumerate(IDS[1:])]


def test_vllm_serves_the_adapter_of_a_checkpoint_as_the_merged_model_says(tmp_path: Path) -> None:
    """The files under `trainer/` are an adapter that the engine loads on the starting policy."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=96, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "start")
    optimizer = OptimizerConfig(learning_rate=2e-2, warmup_steps=0)
    lora = TrainConfig(lora=LoraConfig(rank=8), device="cpu", threads=1, updates=2, optimizer=optimizer)
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
