"""Bisect in figures: planted causes that are named right, with how many stage runs, and verdicts on healthy runs.

    python -m benchmarks.planted_causes [--healthy 10] [--only NAME]

Each planted run (`tests/replay/planted.py`) has eight iterations of a tiny policy, each evaluated, and one thing goes wrong. A
verdict is right when cause and iteration are; of rows, the smallest set of groups is held against the planted one, too. The
bound on stage runs is log2(n) + 6 for n iterations; those for the smallest set are counted apart. Nothing here has an engine.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundhouse.replay.bisect import Bisection, bisect
from tests.replay.planted import HEALTHY, PLANTS, Plant, planted_run

ITERATIONS = 8


def case(plant: Plant, seed: int = 0) -> tuple[Bisection, float]:
    """The verdict on a planted run, and the CPU seconds of the search."""
    with tempfile.TemporaryDirectory() as directory:
        run = planted_run(Path(directory), plant, ITERATIONS, seed)
        begun = time.process_time()
        found = bisect(run.config.store, run.run_id)
        return found, time.process_time() - begun


def row(case: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "value": round(value, 3), "unit": unit, "peer": None, "ratio": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=10, help="healthy runs, each of another seed")
    parser.add_argument("--only", default="", help="plants whose name has this in it")
    arguments = parser.parse_args()
    chosen = [plant for plant in PLANTS if arguments.only in plant.name]
    right, runs, seconds = 0, [], []
    for plant in chosen:
        found, lasted = case(plant)
        named = (found.cause, found.iteration) == (plant.cause, plant.since)
        right += named
        runs.append(found.stage_runs)
        seconds.append(lasted)
        verdict = f"{found.cause or 'none'} {found.iteration}: {found.detail}"
        counts = f"{found.stage_runs:>3}+{found.narrowing_runs:<4}"
        sys.stdout.write(f"{'right' if named else 'WRONG':<6}{plant.name:<40}{counts}{verdict[:110]}\n")
        sys.stdout.flush()
    verdicts = 0
    for seed in range(1, arguments.healthy + 1):
        found, _ = case(replace(HEALTHY, name=f"healthy {seed}"), seed)
        verdicts += bool(found.cause)
        values = " ".join(f"{value:.2f}" for value in found.values.values())
        sys.stdout.write(f"healthy, seed {seed}: {found.cause or 'no verdict'}   {values}\n")
        sys.stdout.flush()
    bound = math.log2(ITERATIONS) + 6
    results = [
        row("planted causes named right", right, f"of {len(chosen)}"),
        row("verdicts on healthy runs", verdicts, f"of {arguments.healthy}"),
    ]
    if runs:
        results += [
            row("most stage runs for a verdict", max(runs), f"of at most {bound:.1f}"),
            row("CPU seconds a verdict, median", sorted(seconds)[len(seconds) // 2], "s"),
        ]
    for each in results:
        sys.stdout.write(f"{each['case']:<40}{each['value']:>8} {each['unit']}\n")
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    sys.stdout.write("\n" + json.dumps({"bench": "bisect", "results": results, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
