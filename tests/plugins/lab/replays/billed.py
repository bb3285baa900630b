"""A run with engine, shards and trainer as processes, driven without Prefect, so that its processes can be killed.

    python -m tests.plugins.lab.replays.billed CONFIG.json

It completes the missing stages of the run, and retries after the loss of a program. It prints the CPU seconds of its
process when it begins to drive. `driven` starts it, performs the kills, and counts CPU time as the system does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.evaluate import evaluate_version
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.refit import engine_at, refit_iteration
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.lease import driving
from roundhouse.store.run import Run, open_run

ATTEMPTS = 20
SHARDS = {"kind": "process", "shards": 2, "restarts": 3}
RANKS = {"kind": "resident", "processes": 2, "timeout_seconds": 60}


def settings(directory: Path, run_id: str, engine_url: str, iterations: int, **keys: Any) -> dict[str, Any]:
    """Return the configuration of a run with the policy in `directory/policy`, as written by `benchmarks.soak.small_policy`."""
    tree: dict[str, Any] = {
        "run_id": run_id,
        "iterations": iterations,
        "store": str(directory / "store"),
        "policy": {"kind": "pretrained", "path": str(directory / "policy")},
        "generation": {
            "backend": "transformers",
            "engine_url": engine_url,
            "max_model_len": 256,
            "sampling": {"max_new_tokens": 48},
        },
        "rollout": {"prompts_per_iteration": 4, "group_size": 4, "distribution": SHARDS},
        "train": {"threads": 1, "device": "cpu", "service": RANKS, "optimizer": {"learning_rate": 3e-4}},
        "validation": {"recompute_tolerance": None},  # the engine's log-probabilities are no policy's
        "evaluation": {"tasks": 4},
        "tracking": {"enabled": False},
        "infra": {"kind": "local", "state": str(directory / "state")},
    }
    return tree | keys


def drive(run: Run) -> None:
    """Complete all iterations."""
    base, cache = starting_policy(run), checkpoint_cache(run.config)
    for k in range(run.first_version + 1, run.config.iterations + 1):
        if (done := run.checkpoint(k).reference()) is not None:
            base = done
            continue
        weights = refit_iteration(run, k, base)
        rollouts = collect_iteration(run, k, weights, engine_at(run, k - 1))
        sequences = validate_iteration(run, k, rollouts, vocabulary_size(run))
        evaluate_version(run, k - 1, engine_at(run, k - 1))
        base = publish(run, train_iteration(run, k, sequences, base, cache))
    refit_iteration(run, run.config.iterations + 1, base)  # with the last count of tokens
    release_trainers()


def main(path: str) -> None:
    run = open_run(parse_config(json.loads(Path(path).read_text())))
    sys.stdout.write(f"{time.process_time()}\n")
    sys.stdout.flush()
    with driving(run.location):
        for attempt in range(ATTEMPTS):
            try:
                drive(run)
                break
            except InfraError as error:
                sys.stderr.write(f"attempt {attempt + 1}: {error}\n")
    os._exit(0)  # what the interpreter does now is after the run


Target = Literal["driver", "shard", "trainer"]
MODULES: dict[Target, str] = {
    "driver": "tests.plugins.lab.replays.billed",
    "shard": "roundhouse.collection.shard_worker",
    "trainer": "roundhouse.training.service.ranks",
}
"""In the command line of each; torchrun's, which starts the ranks, has theirs."""
SPAN_SECONDS = 3.0
"""A kill comes so long after its target began, at most."""
UNRECORDED_SECONDS = 0.5
"""CPU that a killed driver and its programs use at most after what was written last: of two cores in a tenth of a
second, and the end of the programs, whose parent has gone."""


@dataclass(slots=True)
class Killed:
    """Cost of completing a run."""

    cpu_seconds: float = 0.0
    """Of all drivers and their programs, by the system's account, from when each began to drive."""
    kills: Counter[Target] = field(default_factory=Counter)


def driven(config: Path, targets: Sequence[Target], seed: int) -> Killed:
    """Drive a run to its end, and kill these meanwhile, one after the other, as long as it runs."""
    found, rng, left = Killed(), random.Random(seed), list(targets)
    while True:
        with _counted(config, found) as reaper:
            is_killed = False
            while not is_killed and left and reaper.poll() is None:
                if (pid := _next_pid(reaper, left[0], rng)) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                        found.kills[left[0]] += 1
                        is_killed = left.pop(0) == "driver"
        if not is_killed:
            return found


@contextlib.contextmanager
def _counted(config: Path, found: Killed) -> Iterator[subprocess.Popen[str]]:
    """Run a driver under a reaper; add its CPU time at the end of the block, after the end of all its processes."""
    command = [
        sys.executable,
        "-m",
        "tests.plugins.lab.replays.reaper",
        sys.executable,
        "-m",
        MODULES["driver"],
        str(config),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reaper:
        assert reaper.stdout is not None
        before = float(reaper.stdout.readline())
        yield reaper
        found.cpu_seconds += json.loads(reaper.stdout.readline())["cpu_seconds"] - before


def _next_pid(reaper: subprocess.Popen[str], target: Target, rng: random.Random) -> int | None:
    """Wait for a process of this kind, then for some time; None if it has ended by then."""
    chosen: list[psutil.Process] = []
    while not chosen and reaper.poll() is None:
        time.sleep(0.05)
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(reaper.pid).children(recursive=True)
            chosen = [each for each in below if MODULES[target] in each.cmdline()]
    time.sleep(rng.uniform(0, SPAN_SECONDS))
    alive = [each.pid for each in chosen if each.is_running()]
    return rng.choice(alive) if alive else None


if __name__ == "__main__":
    main(sys.argv[1])
