"""Memory plans beside the measured peaks of training steps on this machine's CPU.

    python -m benchmarks.memory_plan [--ranks 2] [--sizes 3]

For each of three models, and for each set of settings, a process of its own (with `--ranks` above 1, as many under torchrun)
loads the model, trains one update, and measures the peak of its resident memory over a second update, above what it had before
the model. That is held beside the plan of `roundhouse doctor --device`. glibc is told to give freed blocks of 64 KiB and more
back to the kernel; resident memory would count them otherwise. The last line is JSON; exit code 1: a plan is over 15 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from roundhouse.config.models import TrainConfig

BOUND = 0.15
TOKENS = 512
"""Of a microbatch: one sequence."""
SHAPES: dict[str, dict[str, int]] = {
    "43 M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048},
    "101 M": {"hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 2816},
    "182 M": {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 3072},
}
COMMON = {"vocab_size": 32_768, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "recomputed": {"activation_checkpointing": True},
    "recomputed, chunked": {"activation_checkpointing": True, "logits_chunk_tokens": 256},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sizes", type=int, default=len(SHAPES), help="how many of the models, smallest first")
    parser.add_argument("--case", help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.case is not None:
        measure(json.loads(arguments.case))
        return
    with tempfile.TemporaryDirectory(prefix="rh-plan-") as directory:
        sys.exit(report(Path(directory), arguments.ranks, list(SHAPES)[: arguments.sizes]))


def report(work: Path, ranks: int, sizes: list[str]) -> int:
    """Print the table; 1 where a plan is too far off."""
    print(f"{ranks} rank{'s' * (ranks > 1)}, one microbatch of {TOKENS} tokens at a time, two in an update")
    print(f"{'model':<8}{'settings':<22}{'plan MiB':>10}{'peak MiB':>10}{'off by':>9}")
    results: list[dict[str, Any]] = []
    for size in sizes:
        for name, changes in SETTINGS.items():
            case = {"shape": SHAPES[size] | COMMON, "train": changes, "directory": str(work / size.replace(" ", ""))}
            found = _run(case, ranks)
            off = found["plan"] / found["peak"] - 1
            print(f"{size:<8}{name:<22}{found['plan']:10.0f}{found['peak']:10.0f}{off:9.1%}", flush=True)
            results.append(
                {
                    "case": f"{size}, {name}",
                    "value": round(found["plan"], 1),
                    "unit": "MiB",
                    "peer": round(found["peak"], 1),
                    "ratio": round(1 + off, 3),
                }
            )
    over = [str(row["case"]) for row in results if abs(row["ratio"] - 1) > BOUND]
    print(f"every plan is within {BOUND:.0%}" if not over else f"more than {BOUND:.0%} off: {'; '.join(over)}")
    machine = {"cpu": platform.processor() or platform.machine(), "ranks": ranks}
    print("\n" + json.dumps({"bench": "memory-plan", "results": results, "machine": machine}))
    return 1 if over else 0


def _run(case: dict[str, Any], ranks: int) -> dict[str, float]:
    own = ["-m", "benchmarks.memory_plan", "--case", json.dumps(case)]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--no-python",
        sys.executable,
    ]
    command = [sys.executable, *own] if ranks == 1 else [sys.executable, *launcher, *own]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return max(found, key=lambda each: each["peak"])


def measure(case: dict[str, Any]) -> None:
    """In a process of its own: print plan and peak in MiB."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roundhouse.training.memory_plan import plan_memory
    from roundhouse.training.parallel import join, leave
    from roundhouse.training.service.engine import TrainEngine
    from roundhouse.training.trainer import Trainer

    torch.set_num_threads(1)
    ranks, directory = join("cpu"), Path(case["directory"])
    shape = Qwen2Config(**case["shape"])
    if ranks.leads and not directory.is_dir():
        torch.manual_seed(0)
        Qwen2ForCausalLM(shape).save_pretrained(directory)
    ranks.wait()
    settings = {"minibatches": 1, "threads": 1, "device": "cpu", "tokens_per_microbatch": TOKENS, **case["train"]}
    train = TrainConfig.model_validate(settings)
    plan = plan_memory(shape, train, ranks.size, TOKENS)
    before = _status("VmRSS")
    trainer = Trainer.over(TrainEngine(train, ranks=ranks), directory, train)
    batch = _sequences(2 * ranks.size)
    trainer.step(batch, 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    trainer.step(batch, 2)
    peak = _status("VmHWM") - before
    sys.stdout.write(json.dumps({"plan": plan.total / 2**20, "peak": peak, "bytes": plan.bytes}) + "\n")
    leave()


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
