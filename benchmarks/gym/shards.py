"""Collection by one process and by shards on an instant engine: rollouts a second, and what a shard costs in CPU.

    python benchmarks/gym/shards.py --rollouts 2000

Every case runs the collect stage itself, with its parts, journal and manifest on a file store, over the same tasks
(guess_number, which the instant engine answers with one message). Cases run in turn, `--repeats` times; the table gives
medians, and the last line is JSON. CPU is that of the stage and of all workers, their start included; the engine is left out,
but shares the cores. `overhead a shard` is the CPU beyond that of one process, divided by the number of shards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rollouts import free_port, served, wait_for

from roundhouse.config.loading import parse_config
from roundhouse.stages.collect import collect_iteration
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest


def collect_once(engine: str, rollouts: int, shards: int, concurrency: int) -> tuple[float, float]:
    """Seconds of wall time and of CPU of one collect stage."""
    distribution = {"kind": "process", "shards": shards} if shards else {"kind": "in_process"}
    rollout = {
        "prompts_per_iteration": rollouts // 4,
        "group_size": 4,
        "concurrency": concurrency,
        "max_tokens": 100_000,
    }
    with tempfile.TemporaryDirectory() as directory:
        tree = {"run_id": "r", "store": directory, "environment": {"kind": "guess_number"}}
        run = open_run(parse_config(tree | {"rollout": rollout | {"distribution": distribution}}))
        weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
        begun = time.perf_counter()
        reference = collect_iteration(run, 1, weights, engine)
        wall = time.perf_counter() - begun
        if reference.counts["completed"] + reference.counts["truncated"] != rollouts:
            raise SystemExit(f"Not all rollouts ended well: {reference.counts}")
        return wall, read_manifest(reference).resources["cpu_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    samples: dict[int, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        port = free_port()
        stack.enter_context(served(str(Path(__file__).with_name("instant_engine.py")), "--port", str(port)))
        engine = f"http://127.0.0.1:{port}"
        wait_for(f"{engine}/v1/models")
        for _ in range(options.repeats):
            for shards in [0, *options.shards]:
                took = collect_once(engine, options.rollouts, shards, options.concurrency)
                samples.setdefault(shards, []).append(took)
    report(options.rollouts, samples)


def report(rollouts: int, samples: dict[int, list[tuple[float, float]]]) -> None:
    """The table, and the line of JSON."""
    cpu = {shards: statistics.median(sample[1] for sample in found) for shards, found in samples.items()}
    results = []
    sys.stdout.write(f"{'case':<14}{'rollouts/s':>12}{'CPU seconds':>14}{'overhead a shard':>18}\n")
    for shards, found in samples.items():
        case = f"{shards} shards" if shards else "one process"
        rate = statistics.median(rollouts / wall for wall, _ in found)
        overhead = (cpu[shards] - cpu[0]) / shards if shards else 0.0
        sys.stdout.write(f"{case:<14}{rate:>12.0f}{cpu[shards]:>14.2f}{overhead:>18.2f}\n")
        for value, unit in ((rate, "rollouts/s"), (cpu[shards], "CPU s"), (overhead, "CPU s a shard")):
            results.append({"case": case, "value": round(value, 3), "unit": unit, "peer": None, "ratio": None})
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "load": os.getloadavg()[0]}
    sys.stdout.write(json.dumps({"bench": "shards", "results": results, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
