"""CPU seconds of a composite model against its language model alone: loading and steps of the trainer, start of the engine.

    python -m benchmarks.composite [--rounds N]

A random Gemma 3 with a vision tower of a tenth of its parameters, and a text model of the same language model, alternate:
each round loads both into the trainer, makes a step on the same text, and builds and loads both in the transformers
engine. The last line is JSON: the ratio of the medians, composite over text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundhouse.config.models import GenerationConfig, TrainConfig
from roundhouse.generation.transformers_engine import build_model as engine_model
from roundhouse.generation.transformers_engine import load_into
from roundhouse.pretrained import build_model, without_progress_bars
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer

TEXT = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 1536, "max_position_embeddings": 1024, "sliding_window": 256,
    "query_pre_attn_scalar": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip


def save(model_type: str, directory: Path) -> Path:
    """Write a random model."""
    from transformers import AutoConfig

    parts: dict[str, Any] = {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    model = build_model(AutoConfig.for_model(model_type, **(parts if model_type == "gemma3" else TEXT)))
    print(f"{model_type}: {model.num_parameters():,} parameters")
    with without_progress_bars():
        model.to(torch.float32).save_pretrained(directory)
    return directory


def sequences() -> TrainingSequences:
    """Return eight sequences of 96 tokens."""
    draw = torch.Generator().manual_seed(1)
    return TrainingSequences.from_records(
        [
            {
                "sequence_id": f"{number}", "rollout_id": f"{number}", "group_id": f"{number // 4}", "policy_version": 0,
                "token_ids": torch.randint(3, 4096, (96,), generator=draw).tolist(), "loss_mask": [0] * 32 + [1] * 64,
                "gen_logprobs": [0.0] * 32 + [-8.0] * 64, "reward": float(number % 2),
            }
            for number in range(8)
        ]
    )  # fmt: skip


def seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    batch, found = sequences(), dict[tuple[str, str], list[float]]()
    with tempfile.TemporaryDirectory() as place:
        models = {kind: save(kind, Path(place) / kind) for kind in ("gemma3", "gemma3_text")}
        for turn in range(rounds + 1):  # the first imports
            for kind, directory in models.items():
                trainers: list[Trainer] = []
                config = TrainConfig(device="cpu", threads=1)

                def load(
                    directory: Path = directory, into: list[Trainer] = trainers, config: TrainConfig = config
                ) -> None:
                    into.append(Trainer.load(directory, config))

                parts = {"load": seconds(load)}
                parts["step"] = seconds(lambda trainer=trainers[0]: trainer.step(batch, 1))  # type: ignore[misc]
                trainers.pop().close()

                def serve(directory: Path = directory) -> None:
                    load_into(engine_model(str(directory), GenerationConfig(threads=1)), str(directory))

                parts["engine"] = seconds(serve)
                for part, cost in parts.items() if turn else ():
                    found.setdefault((part, kind), []).append(cost)
    medians = {key: statistics.median(costs) for key, costs in found.items()}
    for (part, kind), cost in medians.items():
        print(f"{part:8} {kind:12} {cost:.2f} s")
    ratios = {part: medians[part, "gemma3"] / medians[part, "gemma3_text"] for part, _ in medians}
    results = [{"case": part, "value": round(ratio, 3)} for part, ratio in ratios.items()]
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
