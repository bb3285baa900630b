"""What a training step costs: packed against padded, by budget, on lengths as they fall.

    python benchmarks/train_step.py [--device cpu|cuda] [--kind quickstart|skewed] [--repeats N] [--quick]

Cases run alternately, so that a noisy machine is noisy for all of them; the table gives the median and the spread of CPU
(on a GPU: wall) seconds, and the last line is JSON. `naive` pads each update's sequences in the order they come to one
rectangle with logits everywhere: the plain loop one would write first. `dense` is transformers' own way to pack, with a
block mask of the whole row. Real tokens a second count every token of the sequences once an update pass, the same for all.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.packing import pack
from roundhouse.training.trainer import Trainer, plan_updates

VOCABULARY, UPDATES = 512, 4


@dataclass
class Case:
    """One way to take a step; `run` returns its parts in seconds."""

    name: str
    run: Callable[[], dict[str, float]]
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


def make_model(directory: Path, device: str) -> Path:
    """The quickstart's policy (0.13 M parameters) on CPU; something with matrices worth a GPU on CUDA."""
    size: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    size |= {"head_dim": 32, "intermediate_size": 192}
    if device == "cuda":
        size |= {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8}
        size |= {"head_dim": 64, "intermediate_size": 3072}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **size)).save_pretrained(directory)
    return directory


def make_sequences(kind: str, seed: int = 0) -> TrainingSequences:
    """128 sequences: `quickstart`, about 67 tokens with a third generated, or `skewed`, log-normal with a long tail."""
    rng = random.Random(seed)
    rows = []
    for i in range(128):
        length = (
            max(30, round(rng.gauss(67, 9))) if kind == "quickstart" else min(512, 16 + round(rng.lognormvariate(4, 1)))
        )
        trained = length // 3 if kind == "quickstart" else length - 8
        rows.append(
            {
                "sequence_id": str(i),
                "rollout_id": str(i),
                "group_id": str(i // 8),
                "token_ids": [rng.randrange(VOCABULARY) for _ in range(length)],
                "loss_mask": [0] * (length - trained) + [1] * trained,
                "gen_logprobs": [0.0] * (length - trained) + [-6.0] * trained,
                "policy_version": 0,
                "reward": float(i % 2),
            }
        )
    return TrainingSequences.from_records(rows)


def trainer_case(name: str, model: Path, batch: TrainingSequences, device: str, **changes: Any) -> Case:
    """The product's own step."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = TrainConfig.model_validate(
        {"minibatches": UPDATES, "threads": 1, "device": device, "dtype": dtype} | changes
    )
    trainer = Trainer.load(model, config)

    def run() -> dict[str, float]:
        return trainer.step(batch, (trainer.cursor.iteration or 0) + 1).seconds

    return Case(name, run)


def plain_case(name: str, model_dir: Path, batch: TrainingSequences, device: str, forward: Callable[..., Any]) -> Case:
    """A plain loop with the same optimizer: old log-probabilities, then `UPDATES` steps of the surrogate at ratio 1."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OptimizerConfig().learning_rate, fused=True)
    iteration = 0

    def run() -> dict[str, float]:
        nonlocal iteration
        iteration += 1
        parts = plan_updates(range(len(batch)), range(len(batch)), UPDATES, 1, 0, iteration)
        torch.set_num_threads(1)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                for indices in parts:
                    forward(model, batch, indices, device)
            for indices in parts:
                log_probs = torch.cat(forward(model, batch, indices, device))
                (-torch.exp(log_probs - log_probs.detach())).mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return {}

    return Case(name, run)


def naive(model: Any, batch: TrainingSequences, indices: list[int], device: str) -> list[torch.Tensor]:
    """Log-probabilities from one padded rectangle."""
    width = int(batch.lengths[indices].max())
    ids = torch.zeros(len(indices), width, dtype=torch.long)
    mask = torch.zeros(len(indices), width, dtype=torch.long)
    trained = torch.zeros(len(indices), width, dtype=torch.bool)
    for row, s in enumerate(indices):
        inside = slice(batch.offsets[s], batch.offsets[s + 1])
        length = int(batch.lengths[s])
        ids[row, :length] = torch.from_numpy(batch.token_ids[inside].astype(np.int64))
        mask[row, :length] = 1
        trained[row, :length] = torch.from_numpy(batch.loss_mask[inside])
    ids, mask, trained = ids.to(device), mask.to(device), trained.to(device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    log_probs = -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return [log_probs[trained[:, 1:].flatten()]]


def dense(model: Any, batch: TrainingSequences, indices: list[int], device: str, row: int = 256) -> list[torch.Tensor]:
    """Log-probabilities from rows packed under a dense block mask, which transformers makes from the positions."""
    found = []
    for members in pack(batch.lengths[indices].tolist(), row):
        chosen = [indices[i] for i in members]
        flat = np.concatenate([np.arange(batch.offsets[s], batch.offsets[s + 1]) for s in chosen])
        ids = torch.from_numpy(batch.token_ids[flat].astype(np.int64)).to(device)[None]
        positions = torch.cat([torch.arange(int(batch.lengths[s])) for s in chosen]).to(device)[None]
        keep = torch.from_numpy(np.flatnonzero(batch.loss_mask[flat]) - 1).to(device)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep).logits[0].float()
        found.append(-cross_entropy(logits, ids[0][keep + 1], reduction="none"))
    return found


def measure(cases: list[Case], repeats: int, device: str) -> None:
    clock = time.perf_counter if device == "cuda" else time.process_time
    for repeat in range(repeats + 1):
        for case in cases:
            begun = clock()
            parts = case.run()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat > 0:  # the first is a warm-up
                case.seconds.append(clock() - begun)
                case.parts.append(parts)


def table(kind: str, batch: TrainingSequences, cases: list[Case]) -> list[dict[str, Any]]:
    peer = statistics.median(cases[-1].seconds)
    real = len(batch.token_ids)
    print(f"\n{kind}: {len(batch)} sequences, {real} tokens, {int(batch.loss_mask.sum())} trained, {UPDATES} updates")
    print(
        f"{'case':<28}{'s/step':>9}{'min':>8}{'max':>8}{'forward_old':>13}{'updates':>9}{'real tok/s':>12}{'× naive':>9}"
    )
    rows = []
    for case in cases:
        median = statistics.median(case.seconds)
        parts = {
            name: statistics.median([p[name] for p in case.parts])
            for name in ("forward_old", "updates")
            if case.parts[0]
        }
        shown = "".join(f"{parts[name]:>{width}.3f}" if name in parts else " " * width for name, width in _PARTS)
        print(
            f"{case.name:<28}{median:>9.3f}{min(case.seconds):>8.3f}{max(case.seconds):>8.3f}{shown}"
            f"{real / median:>12.0f}{peer / median:>9.2f}"
        )
        rows.append(
            {
                "case": f"{kind}/{case.name}",
                "value": round(real / median, 1),
                "unit": "real tokens/s",
                "peer": round(real / peer, 1),
                "ratio": round(peer / median, 3),
                "seconds": round(median, 4),
                "seconds_min": round(min(case.seconds), 4),
                "seconds_max": round(max(case.seconds), 4),
            }
        )
    return rows


_PARTS = (("forward_old", 13), ("updates", 9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--kind", choices=["quickstart", "skewed"], action="append", help="lengths to measure; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="the default budget only, three repeats")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        print("No GPU here: measuring on CPU instead.")
        device = "cpu"
    budgets = [4096] if arguments.quick else [256, 1024, 4096, 16384]
    results = []
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), device)
        for kind in arguments.kind or ("quickstart", "skewed"):
            batch = make_sequences(kind)
            cases = [
                trainer_case(f"packed {b}", model, batch, device, packing=True, tokens_per_microbatch=b)
                for b in budgets
            ]
            cases += [
                trainer_case(f"padded {b}", model, batch, device, packing=False, tokens_per_microbatch=b)
                for b in budgets
            ]
            cases += [plain_case("dense mask, rows of 256", model, batch, device, dense)]
            cases += [plain_case("naive", model, batch, device, naive)]
            measure(cases, 3 if arguments.quick else arguments.repeats, device)
            results += table(kind, batch, cases)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "device": device,
        "threads": 1,
        "torch": torch.__version__,
    }
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    print("\n" + json.dumps({"bench": "train", "results": results, "machine": machine}))


if __name__ == "__main__":
    main()
