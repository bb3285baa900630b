"""What the journal of finished model calls costs: CPU milliseconds a rollout with and without it, on one instant engine.

    python benchmarks/gym/journal.py

Three cases play the same rollouts in turn, `--repeats` times: without a journal; with one, for rollouts that finish before the
journal is next written (`quick`), which cost a digest a call; and for rollouts that take longer (`slow`), each call of which
goes through Parquet. CPU is the collector's own. The table gives medians, and the spread of the ratios; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import statistics
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
from rollouts import HERE, Weather, free_port, rows, served, wait_for

from roundhouse.collection.collector import journal_parquet
from roundhouse.config.models import GenerationConfig, RolloutConfig, Sampling
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.rollout.clients import LocalEnvironmentClient
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.replay import TurnJournal
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.gym.collecting import collect

KINDS = ["turns=3", "turns=3 tokens=4096+1024", "turns=12 tokens=512+256"]


class Repeatable(Weather):
    """The weather, which answers the same every time."""

    restoration = "replay"


class Slow(TurnJournal):
    """A journal of rollouts that take longer than a flush: no call is dropped because its rollout finished before."""

    def finished(self, rollout: Rollout) -> None:
        """Nothing is dropped."""


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def cpu_ms(engine: str, kind: str, count: int, journal: TurnJournal | None) -> float:
    """CPU milliseconds of a rollout, all of them written down at the end as a collect stage does."""
    specs = plan_rollouts(rows(kind, count), 1, seed=0, iteration=1)
    config = RolloutConfig(concurrency=128, max_tokens=100_000, max_turns=32)
    finished = None if journal is None else journal.finished

    async def work() -> list[Rollout]:
        async with HttpPolicyClient(engine, GenerationConfig()) as policy:
            client = LocalEnvironmentClient(Repeatable())
            return await collect(
                specs, policy, client, config, Sampling(max_new_tokens=4096), finished, journal=journal
            )

    gc.collect()
    before = time.process_time()
    rollouts = asyncio.run(work())
    parquet(turns_table(rollouts))
    parquet(rollouts_table(rollouts))
    if journal is not None and (calls := journal.take()) is not None:
        journal_parquet(calls)
    used = time.process_time() - before
    if any(rollout.status is not Status.COMPLETED for rollout in rollouts):
        raise SystemExit(f"a rollout did not complete: {rollouts[0]}")
    return 1000 * used / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    options = parser.parse_args()
    cases: dict[str, Callable[[], TurnJournal | None]] = {
        "without a journal": lambda: None,
        "quick rollouts": lambda: TurnJournal(0),
        "slow rollouts": lambda: Slow(0),
    }
    results = []
    port = free_port()
    with served(str(HERE / "instant_engine.py"), "--port", str(port)):
        engine = f"http://127.0.0.1:{port}"
        wait_for(f"{engine}/v1/models")
        for kind in options.kinds:
            cpu_ms(engine, kind, 32, None)
            samples: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(options.repeats):
                for name, make in cases.items():
                    samples[name].append(cpu_ms(engine, kind, options.rollouts, make()))
            base = samples["without a journal"]
            print(f"\n{kind}\n{'case':<24}{'CPU ms/rollout':>16}{'of without':>12}{'spread':>18}")
            for name, found in samples.items():
                ratios = [value / without for value, without in zip(found, base, strict=True)]
                ratio, value = statistics.median(ratios), statistics.median(found)
                print(f"{name:<24}{value:>16.3f}{ratio:>12.3f}{f'{min(ratios):.3f}-{max(ratios):.3f}':>18}")
                results.append(
                    {
                        "case": f"{name}, {kind}",
                        "value": round(value, 3),
                        "unit": "CPU ms/rollout",
                        "ratio": round(ratio, 4),
                    }
                )
    print("\n" + json.dumps({"bench": "journal", "results": results}))


if __name__ == "__main__":
    main()
