"""The bill of runs whose processes are killed at random moments, against the engine's and the system's own counts.

    python -m benchmarks.bill [--kills 100] [--forks 5] [--iterations 3] [--seed 0]

A run and its forks are driven one after the other (`tests.plugins.lab.replays.billed`: shards, resident ranks, evaluations,
no Prefect), at an engine that computes nothing and takes its time. Meanwhile drivers, shards and ranks are killed with
SIGKILL. Then

    tokens         of all bills, against those that the engine's process noted with each answer: equal
    CPU seconds    of all bills, against what the system counted of all processes, from when each driver began to drive

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak import small_policy
from benchmarks.timed_engine import TimedEngine
from roundhouse.config.generation import GenerationConfig
from roundhouse.generation import serve_app, standalone
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import Draw, Engine, Generated
from roundhouse.stages.cost import bill_of
from roundhouse.store.run import load_run
from tests.chaos.stand import Server
from tests.plugins.lab.replays import billed

CHANCES: dict[billed.Target, int] = {"shard": 6, "trainer": 2, "driver": 2}
MEDIAN_SECONDS, SIGMA = 0.4, 0.5
"""Of an answer of the engine."""


class CountingEngine(TimedEngine):
    """Notes the tokens of each answer."""

    median, sigma = MEDIAN_SECONDS, SIGMA
    notes = Path()

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        answer = await super().generate(prompt_token_ids, draw)
        with self.notes.open("a") as notes:
            notes.write(f"{len(answer.token_ids)}\n")
        return answer


def serve(notes: str, rest: Sequence[str]) -> None:
    """The engine's process."""
    CountingEngine.notes = Path(notes)

    def make_engine(config: GenerationConfig, model_dir: str, served_name: str, codec: ChatCodec) -> Engine:
        return CountingEngine(config, codec)

    serve_app.make_engine = make_engine
    standalone.main(rest)


def measured(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens and CPU seconds of all runs: of their bills by cause, and as counted."""
    notes, rng = directory / "notes", random.Random(options.seed)
    small_policy(directory / "policy")
    engine = Server(
        "engine", ["-m", "benchmarks.bill", "--engine", str(notes)], directory / "engine.log", "/rh/replicas"
    )
    engine.start()
    bills: dict[str, Counter[str]] = {"tokens": Counter(), "cpu_seconds": Counter()}
    kills, used = Counter[str](), 0.0
    try:
        engine.wait_until_it_answers()
        for number in range(1 + options.forks):
            left = options.kills - kills.total()
            share = -(-left // (1 + options.forks - number))
            targets = rng.choices([*CHANCES], [*CHANCES.values()], k=share)
            tree = _settings(directory, number, engine.url, options.iterations)
            config = directory / f"{tree['run_id']}.json"
            config.write_text(json.dumps(tree))
            found = billed.driven(config, targets, rng.randrange(2**32))
            bill = bill_of(load_run(tree["store"], tree["run_id"]))
            for part, causes in bills.items():
                causes.update(bill[part])
            kills.update(found.kills)
            used += found.cpu_seconds
            print(
                f"{tree['run_id']}: kills {dict(found.kills)}, CPU {found.cpu_seconds:.1f} s, "
                f"bill {sum(bill['cpu_seconds'].values()):.1f} s",
                flush=True,
            )
    finally:
        engine.stop()
    return {"bills": bills, "kills": kills, "cpu_seconds": used, "tokens": sum(map(int, notes.read_text().split()))}


def _settings(directory: Path, number: int, url: str, iterations: int) -> dict[str, Any]:
    """Of the run, or of a fork of its version 1."""
    if number == 0:
        return billed.settings(directory, "run", url, iterations)
    origin = load_run(str(directory / "store"), "run").checkpoint(1).location.uri
    resume = {"mode": "from_path", "path": origin}
    return billed.settings(directory, f"fork-{number}", url, 1 + iterations, resume=resume)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="at most: a run that ends is not killed any more")
    parser.add_argument("--forks", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3, help="of the run and of each fork")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", metavar="NOTES", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.engine is not None:
        return serve(options.engine, rest)
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(Path(scratch), options)
    return report(found, options)


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """A row a cause, the sums beside what was counted, and the line of JSON."""
    tokens, seconds = found["bills"]["tokens"], found["bills"]["cpu_seconds"]
    print(f"\n{'cause':<14}{'tokens':>10}{'CPU s':>10}")
    for cause in sorted(tokens.keys() | seconds.keys()):
        print(f"{cause:<14}{tokens[cause]:>10,.0f}{seconds[cause]:>10.1f}")
    print(f"{'bill':<14}{tokens.total():>10,.0f}{seconds.total():>10.1f}")
    print(f"{'counted':<14}{found['tokens']:>10,}{found['cpu_seconds']:>10.1f}")
    missing = 1 - seconds.total() / found["cpu_seconds"]
    results = [
        {"case": "kills", "value": found["kills"].total(), "unit": "kills", **found["kills"]},
        {"case": "forks", "value": options.forks, "unit": "runs"},
        {"case": "tokens on the bill", "value": tokens.total(), "unit": "tokens", "counted": found["tokens"]},
        {"case": "tokens interrupted", "value": tokens["interrupted"], "unit": "tokens"},
        {
            "case": "CPU seconds not on the bill",
            "value": round(missing, 5),
            "unit": "share",
            "counted": round(found["cpu_seconds"], 1),
        },
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"bench": "bill", "seed": options.seed, "results": results, "machine": machine}))


if __name__ == "__main__":
    main()
