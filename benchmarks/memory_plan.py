"""Memory plans beside the measured peaks of training steps on this machine's CPU.

    python -m benchmarks.memory_plan [--ranks 2] [--sizes 3] [--settings 3]     one process, or as many ranks under FSDP2
    python -m benchmarks.memory_plan --layouts [--sizes 1]                      1, 2 and 4 ranks in each layout

For each model and set of settings, a process of its own (or as many ranks, under torchrun) loads the model, trains one update,
and measures the peak of its resident memory over a second update, above what the process had after training a tiny model in the
same way: libraries and connections are no part of a plan. That is held beside the plan of `roundhouse doctor --device`; of
several ranks, the largest peak counts. The last line is JSON; exit code 1: a plan is over 15 % off.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundhouse.config.models import TrainConfig

if TYPE_CHECKING:
    from roundhouse.training.parallel import Ranks
    from roundhouse.training.trainer import Trainer

BOUND = 0.15
TOKENS = 512
"""Of a microbatch: one sequence."""
SHAPES: dict[str, dict[str, int]] = {
    "43 M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048},
    "101 M": {"hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 2816},
    "182 M": {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 3072},
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
COMMON = {"vocab_size": 32_768, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "recomputed": {"activation_checkpointing": True},
    "recomputed, chunked": {"activation_checkpointing": True, "logits_chunk_tokens": 256},
    "reference": {"algorithm": {"kl_coefficient": 0.1}},
    "reference, adapter": {"algorithm": {"kl_coefficient": 0.1}, "lora": {"rank": 8}},
}
LOW = {"dtype": "bfloat16", "logits_chunk_tokens": 256}
SETTINGS |= {f"{name}, bf16": SETTINGS[name] | LOW for name in ("reference", "reference, adapter")}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "FSDP2, 2 ranks": (2, {}),
    "CP2, 2 ranks": (2, {"context_parallel": 2}),
    "FSDP2, 4 ranks": (4, {}),
    "FSDP2 x TP2, 4 ranks": (4, {"tensor_parallel": 2}),
    "CP2, 4 ranks": (4, {"context_parallel": 2}),
    "HSDP, 2 x 2 ranks": (4, {"data_parallel_replicate": 2}),
}
"""Ranks, and keys of `train.service`."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and settings, of which one process measures its part."""

    size: str
    name: str
    ranks: int
    train: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sizes", type=int, help="how many of the models, smallest first (with --layouts 1, else all)")
    parser.add_argument(
        "--settings",
        type=int,
        default=len(SETTINGS) - 2,
        help="how many of them, without --layouts; the last two compute in bfloat16, slow on many CPUs",
    )
    parser.add_argument("--layouts", action="store_true", help="1, 2 and 4 ranks in each layout, in place of settings")
    parser.add_argument("--case", help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.case is not None:
        measure(json.loads(arguments.case))
        return
    sizes = list(SHAPES)[: arguments.sizes or (1 if arguments.layouts else len(SHAPES))]
    settings = list(SETTINGS)[: arguments.settings]
    with tempfile.TemporaryDirectory(prefix="rh-plan-") as directory:
        sys.exit(report(Path(directory), cases(sizes, arguments.ranks, settings, layouts=arguments.layouts)))


def cases(sizes: list[str], ranks: int, settings: list[str], *, layouts: bool) -> list[Case]:
    """The rows of the table."""
    if not layouts:
        return [Case(size, name, ranks, SETTINGS[name]) for size in sizes for name in settings]
    return [
        Case(size, name, count, {"service": {"kind": "resident", "processes": count, **keys}})
        for size in sizes
        for name, (count, keys) in LAYOUTS.items()
    ]


def report(work: Path, wanted: list[Case]) -> int:
    """Print the table; 1 where a plan is too far off."""
    print(f"one microbatch of {TOKENS} tokens at a time, two in an update of each rank")
    print(f"{'model':<8}{'settings':<26}{'ranks':>6}{'plan MiB':>10}{'peak MiB':>10}{'off by':>9}")
    results: list[dict[str, Any]] = []
    for case in wanted:
        found = _run(case, work)
        off = found["plan"] / found["peak"] - 1
        figures = f"{case.ranks:6}{found['plan']:10.0f}{found['peak']:10.0f}{off:9.1%}"
        print(f"{case.size:<8}{case.name:<26}{figures}", flush=True)
        results.append(
            {
                "case": f"{case.size}, {case.name}",
                "value": round(found["plan"], 1),
                "unit": "MiB",
                "peer": round(found["peak"], 1),
                "ratio": round(1 + off, 3),
            }
        )
    over = [str(row["case"]) for row in results if abs(row["ratio"] - 1) > BOUND]
    print(f"every plan is within {BOUND:.0%}" if not over else f"more than {BOUND:.0%} off: {'; '.join(over)}")
    machine = {"cpu": platform.processor() or platform.machine(), "ranks": max(case.ranks for case in wanted)}
    print("\n" + json.dumps({"bench": "memory-plan", "results": results, "machine": machine}))
    return 1 if over else 0


def _run(case: Case, work: Path) -> dict[str, float]:
    shape, directory = SHAPES[case.size] | COMMON, work / case.size.replace(" ", "")
    described = json.dumps({"shape": shape, "train": case.train, "directory": str(directory)})
    own = ["-m", "benchmarks.memory_plan", "--case", described]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(case.ranks),
        "--no-python",
        sys.executable,
    ]
    command = [sys.executable, *own] if case.ranks == 1 else [sys.executable, *launcher, *own]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return max(found, key=lambda each: each["peak"])


def measure(case: dict[str, Any]) -> None:
    """In a process of its own: print plan and peak in MiB."""
    import torch
    from transformers import Qwen2Config

    from roundhouse.training.memory_plan import plan_memory
    from roundhouse.training.parallel import TIMEOUT, join, leave

    torch.set_num_threads(1)
    settings = {"minibatches": 1, "threads": 1, "device": "cpu", "tokens_per_microbatch": TOKENS, **case["train"]}
    train = TrainConfig.model_validate(settings)
    ranks, directory = join("cpu", TIMEOUT, **train.parallelism), Path(case["directory"])
    shape = case["shape"] | {"dtype": train.dtype}
    plan = plan_memory(Qwen2Config(**shape), train, ranks.size, TOKENS)
    _trained(shape | TINY, directory.with_name("tiny"), train, ranks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    trainer, batch = _trained(shape, directory, train, ranks)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    trainer.step(batch, 2)
    found = {"plan": plan.total / 2**20, "peak": _status("VmHWM") - before, "before": before, "bytes": plan.bytes}
    sys.stdout.write(json.dumps(found) + "\n")
    leave()


def _trained(shape: dict[str, Any], directory: Path, train: TrainConfig, ranks: Ranks) -> tuple[Trainer, Any]:
    """A model of this shape after one update, and the sequences of the next."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roundhouse.training.service.engine import TrainEngine
    from roundhouse.training.trainer import Trainer

    directory = directory.with_name(f"{directory.name}-{train.dtype}")
    if ranks.leads and not directory.is_dir():
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**shape)).to(getattr(torch, train.dtype)).save_pretrained(directory)
    ranks.wait()
    reference = None if train.reference_is_frozen else directory
    trainer = Trainer.over(TrainEngine(train, ranks=ranks), directory, train, reference_dir=reference)
    batch = _sequences(2 * ranks.size // ranks.sharing)
    trainer.step(batch, 1)
    return trainer, batch


def _status(key: str) -> float:
    """Of this process, in MiB."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1024


def _sequences(count: int) -> Any:
    from roundhouse.training.batch import TrainingSequences

    ids = np.random.default_rng(0).integers(0, COMMON["vocab_size"], (count, TOKENS + 1)).tolist()
    return TrainingSequences.from_records(
        [
            {
                "sequence_id": str(number),
                "rollout_id": str(number),
                "group_id": "0",
                "token_ids": row,
                "loss_mask": [0] + [1] * TOKENS,
                "gen_logprobs": [0.0] + [-10.0] * TOKENS,
                "policy_version": 0,
                "reward": float(number % 2),
            }
            for number, row in enumerate(ids)
        ]
    )


if __name__ == "__main__":
    main()
