"""Cost of the process in which user code runs: CPU milliseconds of a rollout with the environment there and in the collector.

    python benchmarks/gym/hosted.py

Two cases play the same rollouts in turn on one instant engine, `--repeats` times. CPU counts the collector and the process of
the environment after its start, and leaves the engine out. The table gives medians, the spread of the ratios and the least
value, which other work on the machine disturbs least; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time

import psutil
from journal import parquet
from rollouts import HERE, Weather, free_port, rows, served, wait_for

from roundhouse.config.environments import CustomEnvironment
from roundhouse.config.models import GenerationConfig, RolloutConfig, Sampling
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.rollout.clients import LocalEnvironmentClient, open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.gym.collecting import collect

KINDS = ["turns=1", "turns=3", "turns=3 tokens=4096+1024"]
CASES = {"in the collector": False, "in a process of its own": True}


def cpu_seconds(engine_pid: int) -> float:
    """CPU seconds of this process and of its children but the engine."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        if child.pid != engine_pid:
            times = child.cpu_times()
            total += times.user + times.system
    return total


def cpu_ms(engine: str, engine_pid: int, kind: str, count: int, is_hosted: bool) -> float:
    """CPU milliseconds of a rollout, all of them written down at the end as a collect stage does."""
    specs = plan_rollouts(rows(kind, count), 1, seed=0, iteration=1)
    config = RolloutConfig(concurrency=128, max_tokens=100_000, max_turns=32)
    custom = CustomEnvironment(kind="custom", target="rollouts:Weather")

    async def work() -> tuple[list[Rollout], float, float]:
        async with (
            HttpPolicyClient(engine, GenerationConfig()) as policy,
            open_environment(custom) if is_hosted else LocalEnvironmentClient(Weather()) as client,
        ):
            sampling = Sampling(max_new_tokens=4096)
            await collect(specs[:8], policy, client, config, sampling)
            gc.collect()
            before = cpu_seconds(engine_pid)
            rollouts = await collect(specs, policy, client, config, sampling)
            parquet(turns_table(rollouts))
            parquet(rollouts_table(rollouts))
            return rollouts, before, cpu_seconds(engine_pid)

    rollouts, before, after = asyncio.run(work())
    if any(rollout.status is not Status.COMPLETED for rollout in rollouts):
        raise SystemExit(f"a rollout did not complete: {rollouts[0]}")
    return 1000 * (after - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    options = parser.parse_args()
    results = []
    port = free_port()
    with served(str(HERE / "instant_engine.py"), "--port", str(port)) as pid:
        engine = f"http://127.0.0.1:{port}"
        wait_for(f"{engine}/v1/models")
        for kind in options.kinds:
            samples: dict[str, list[float]] = {name: [] for name in CASES}
            for _ in range(options.repeats):
                for name, is_hosted in CASES.items():
                    samples[name].append(cpu_ms(engine, pid, kind, options.rollouts, is_hosted))
            base = samples["in the collector"]
            print(f"\n{kind}\n{'case':<26}{'CPU ms/rollout':>16}{'of the first':>14}{'spread':>18}{'least':>10}")
            for name, values in samples.items():
                ratios = [value / first for value, first in zip(values, base, strict=True)]
                ratio, value = statistics.median(ratios), statistics.median(values)
                spread = f"{min(ratios):.3f}-{max(ratios):.3f}"
                print(f"{name:<26}{value:>16.3f}{ratio:>14.3f}{spread:>18}{min(values):>10.3f}")
                result = {"case": f"{name}, {kind}", "value": round(value, 3), "unit": "CPU ms/rollout"}
                results.append(result | {"ratio": round(ratio, 4), "least": round(min(values), 3)})
    print("\n" + json.dumps({"bench": "hosted", "results": results}))


if __name__ == "__main__":
    main()
