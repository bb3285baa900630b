"""Bisect in figures: planted causes that are named right, with how many stage runs, and verdicts on healthy runs.

    python -m benchmarks.planted_causes [--healthy 10] [--only NAME] [--seed 0 …] [--trials]

Each planted run (`tests/plugins/lab/replays/planted.py`) has eight iterations of a tiny policy, each evaluated, and one thing
goes wrong. A verdict is right when cause and iteration are. A plant that did no harm has no fall to explain and
does not count. A likely cause is counted apart, and so is a fall without a verdict. The bound on stage runs is log2(n) + 6 for
n iterations; those for the smallest set are counted apart. Nothing here has an engine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundhouse.plugins.lab.replays.bisect import Bisection, bisect
from tests.plugins.lab.replays.planted import HEALTHY, PLANTS, Plant, planted_run

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


def outcome(plant: Plant, found: Bisection) -> str:
    """Return `right`, `wrong`, `likely` (the right cause, not measured), `unlikely` (another one), `none`, or `no fall`."""
    if found.fall is None:
        return "no fall"
    if found.cause:
        return "right" if (found.cause, found.iteration) == (plant.cause, plant.since) else "wrong"
    if found.likely:
        return "likely" if found.likely == plant.cause else "unlikely"
    return "none"


def line(plant: Plant, seed: int, found: Bisection) -> str:
    """Return the verdict on one run."""
    named = f"{found.cause or f'likely {found.likely}'} {found.iteration}: {found.detail}"
    verdict = named if found.cause or found.likely else ""
    counts = f"{found.stage_runs:>3}+{found.narrowing_runs:<4}"
    return f"{outcome(plant, found):<8}{seed:>5} {plant.name:<40}{counts}{verdict[:100]}\n"


def trials(found: Bisection) -> str:
    """Return the trials and notes of a search, a line each."""
    fall = found.fall
    head = "" if fall is None else f"fall {fall.before:.3f} → {fall.after:.3f}, versions {fall.good} → {fall.bad}"
    rows = [
        f"{each.cause}: {each.what[:80]}: {'not measured' if each.recovered is None else f'{each.recovered:.2f}'}"
        for each in found.trials
    ]
    return "".join(f"            {text}\n" for text in [head, *rows, *found.notes])


def report(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=10, help="healthy runs, each of another seed")
    parser.add_argument("--only", default="", help="plants whose name has this in it")
    parser.add_argument(
        "--seed", type=int, default=[0], nargs="+", help="of the planted runs; the rules were made on 0"
    )
    parser.add_argument(
        "--trials", action="store_true", help="print the trials of a fall whose cause is not named right"
    )
    arguments = parser.parse_args()
    chosen = [plant for plant in PLANTS if arguments.only in plant.name]
    outcomes, runs, seconds = Counter[str](), [], []
    for seed in arguments.seed:
        for plant in chosen:
            found, lasted = case(plant, seed)
            outcomes[outcome(plant, found)] += 1
            runs.append(found.stage_runs)
            seconds.append(lasted)
            report(line(plant, seed, found))
            if arguments.trials and outcome(plant, found) not in ("right", "no fall"):
                report(trials(found))
    verdicts = 0
    for seed in range(1, arguments.healthy + 1):
        found, _ = case(replace(HEALTHY, name=f"healthy {seed}"), seed)
        verdicts += bool(found.cause)
        values = " ".join(f"{value:.2f}" for value in found.values.values())
        report(f"healthy, seed {seed}: {found.cause or 'no verdict'}   {values}\n")
    bound = math.log2(ITERATIONS) + 6
    fallen = outcomes.total() - outcomes["no fall"]
    results = [
        row("planted causes named right", outcomes["right"], f"of {fallen} that fell, {outcomes.total()} planted"),
        row("named wrong", outcomes["wrong"], f"of {fallen}"),
        row("named as likely, not measured", outcomes["likely"], f"of {fallen}"),
        row("another cause named as likely", outcomes["unlikely"], f"of {fallen}"),
        row("without a verdict", outcomes["none"], f"of {fallen}"),
        row("verdicts on healthy runs", verdicts, f"of {arguments.healthy}"),
    ]
    if runs:
        results += [
            row("most stage runs for a verdict", max(runs), f"of at most {bound:.1f}"),
            row("CPU seconds a verdict, median", sorted(seconds)[len(seconds) // 2], "s"),
        ]
    for each in results:
        report(f"{each['case']:<40}{each['value']:>8} {each['unit']}\n")
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    report("\n" + json.dumps({"bench": "bisect", "results": results, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
