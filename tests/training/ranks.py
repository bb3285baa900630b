"""Program for `torchrun` in tests: every rank trains the cases of a JSON file, rank 0 writes the results.

    torchrun --nproc-per-node 2 tests/training/ranks.py cases.json

A case: name, model, state (or null), reference (or null), config, batches (groups, size, seed of each), first (iteration).
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from roundhouse.config.models import TrainConfig
from roundhouse.training import parallel
from roundhouse.training.parallel import Ranks, join, leave
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.verbs import Role
from roundhouse.training.trainer import Trainer
from tests.training.tiny import sequences

CLONE_NEWUTS = 0x04000000


def train(case: dict[str, Any], out: Path, ranks: Ranks) -> dict[str, Any]:
    """Train the case and save it under its name; its metrics, log-probabilities and how its parameters are sharded."""
    config = TrainConfig.model_validate(case["config"])
    if ranks.size > 1:
        ranks = join("cpu", **config.parallelism)
    trainer = Trainer.over(
        TrainEngine(config, ranks=ranks, temperature=0.9),
        Path(case["model"]),
        config,
        trainer_state=case["state"] and Path(case["state"]),
        reference_dir=case["reference"] and Path(case["reference"]),
        seed=3,
    )
    metrics, log_probs, reductions = [], [], _count_reductions()
    for iteration, (groups, size, seed) in enumerate(case["batches"], case["first"]):
        report = trainer.step(sequences(groups, size, seed=seed), iteration)
        metrics.append(report.metrics)
        log_probs.append(report.columns.column("trainer_logprobs").to_pylist())
    trainer.save(out / case["name"])
    parameter = next(trainer.model.parameters())
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    groups = sum(isinstance(module, FSDPModule) for module in trainer.engine._scorers[Role.POLICY].modules())
    counts = {"reductions": reductions[0], "groups": groups}
    return {"metrics": metrics, "log_probs": log_probs, "local": local.numel(), "whole": parameter.numel(), **counts}


def _count_reductions() -> list[int]:
    """Return a list with one element that counts the sums of gradients over the ranks from now on."""
    found = [0]
    reduce: Any = getattr(distributed.reduce_scatter_single, "counted", distributed.reduce_scatter_single)

    def counting(*arguments: Any, **options: Any) -> Any:
        found[0] += 1
        return reduce(*arguments, **options)

    counting.counted = reduce  # type: ignore[attr-defined]
    distributed.reduce_scatter_single = counting
    return found


def _listening(process: psutil.Process) -> list[str]:
    """Addresses at which it can be reached by TCP."""
    return [each.laddr.ip for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def main() -> None:
    torch.set_num_threads(1)
    parallel.PIECE_BYTES = 1000  # tensors of tiny models travel in several pieces
    spec = Path(sys.argv[1])
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0:
        socket.sethostname("127.0.0.2")  # where gloo would listen by itself
    ranks = join("cpu")
    found = {case["name"]: train(case, spec.parent, ranks) for case in json.loads(spec.read_text())}
    if ranks.leads:
        processes = {"rank": psutil.Process(), "torchrun": psutil.Process().parent()}
        listening = {name: _listening(process) for name, process in processes.items() if process}
        (spec.parent / "listening.json").write_text(json.dumps(listening))
        (spec.parent / "found.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
