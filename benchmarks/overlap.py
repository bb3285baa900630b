"""What overlapping collection and training gives in real runs, and what `roundhouse simulate` had foretold.

    python benchmarks/overlap.py [--iterations 8] [--staleness 1 2] [--median 6]

Real: `roundhouse train` with its flows, Prefect server, store, journal, validation and a (tiny) trainer. Replaced: inference,
by an engine that only takes time (`timed_engine.py`), so that two cores can hold a whole cluster's waiting. The synchronous
run and the overlapped ones have the same rollouts with the same seconds.

The forecast is made from the synchronous run alone, as with `--from-run`: its iterations from the second on, simulated with 20
seeds. Compared are seconds an iteration from version 1 to the last, evaluation left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from benchmarks.soak import small_policy
from roundhouse.infra import services
from roundhouse.plugins.lab.simulation.comparison import recorded_scenario
from roundhouse.plugins.lab.simulation.run import simulate
from roundhouse.plugins.lab.simulation.scenario import parse_scenario
from roundhouse.stages.report import iteration_manifests
from roundhouse.store.run import Run, load_run
from tests.chaos.stand import Server

SEEDS = 20
RUN_SECONDS = 1800.0


@dataclass(frozen=True)
class Measured:
    """Of version 1 to the last, an iteration."""

    seconds: float
    waited: float
    """Share of the time in which nothing was validated, trained or published."""
    age: float
    """Mean, of the trained tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1])
    parser.add_argument("--median", type=float, default=6.0, help="seconds of a model call")
    parser.add_argument("--sigma", type=float, default=0.7, help="of their logarithm")
    parser.add_argument("--directory", type=Path, help="keep everything here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        results = _compare(directory, options)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"bench": "overlap", "results": results, "machine": machine}))


def _compare(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    small_policy(directory / "policy")
    command = [str(Path(__file__).with_name("timed_engine.py")), "--median", str(options.median), "--sigma"]
    engine = Server(
        "engine", [*command, str(options.sigma), "--refit", "0.2"], directory / "engine.log", "/rh/replicas"
    )
    state = directory / "state" / "services"
    engine.start()
    services.up(state, ("prefect",))
    try:
        engine.wait_until_it_answers()
        sync = _train(directory, engine.url, options.iterations, 0)
        overlapped = {bound: _train(directory, engine.url, options.iterations, bound) for bound in options.staleness}
    finally:
        services.down(state)
        engine.stop()
    return _table(sync, overlapped)


def _table(sync: Run, overlapped: dict[int, Run]) -> list[dict[str, Any]]:
    print(f"{'':<22}{'s/iteration':>12}{'foretold':>10}{'off':>7}{'speed':>8}{'waits':>8}{'age':>7}")
    base, results = measured(sync), []
    for bound, run in {0: sync, **overlapped}.items():
        found, told = measured(run), foretold(sync, bound)
        name = "sync" if bound == 0 else f"batch-async, {bound}"
        print(
            f"{name:<22}{found.seconds:>12.2f}{told:>10.2f}{found.seconds / told - 1:>+7.1%}"
            f"{base.seconds / found.seconds:>7.2f}×{found.waited:>8.0%}{found.age:>7.2f}"
        )
        results += [
            {
                "case": f"{name}: seconds an iteration",
                "value": round(found.seconds, 3),
                "unit": "s",
                "foretold": round(told, 3),
            },
            {"case": f"{name}: trainer waits", "value": round(found.waited, 3), "unit": "share"},
            {"case": f"{name}: mean age", "value": round(found.age, 3), "unit": "versions"},
        ]
    return results


def measured(run: Run) -> Measured:
    """A finished run."""
    manifests = {k: iteration_manifests(run, k) for k in range(1, run.config.iterations + 1)}
    own = [found for k, found in manifests.items() if k > 1]
    evaluated = sum(_seconds(found, "evaluate", "promote") for found in own)
    first, last = manifests[1]["report"], manifests[run.config.iterations]["report"]
    whole = last.finished_at - first.finished_at - evaluated
    worked = sum(_seconds(found, "validate", "train", "checkpoint") for found in own)
    ages = [found["train"].metrics.get("staleness/age_mean", 0.0) for found in own]
    return Measured(whole / len(own), 1 - worked / whole, statistics.fmean(ages))


def foretold(sync: Run, bound: int) -> float:
    """Seconds an iteration from version 1 on, by simulation from the synchronous run's iterations but the first."""
    tree = recorded_scenario(sync, since=2)
    mode = {"mode": "batch-async", "staleness": bound} if bound else {"mode": "sync"}
    spans = []
    for seed in range(SEEDS):
        ended = simulate(parse_scenario({**tree, "seed": seed, "asynchrony": mode})).ended_at
        spans.append((ended[-1] - ended[0]) / (len(ended) - 1))
    return statistics.fmean(spans)


def _seconds(manifests: dict[str, Any], *stages: str) -> float:
    return sum(manifests[kind].finished_at - manifests[kind].started_at for kind in stages if kind in manifests)


def _train(directory: Path, engine: str, iterations: int, bound: int) -> Run:
    run_id = f"bound-{bound}"
    settings = {
        "run_id": run_id,
        "iterations": iterations,
        "store": str(directory / "store"),
        "policy": {"kind": "pretrained", "path": str(directory / "policy")},
        "generation": {
            "backend": "transformers",
            "engine_url": engine,
            "max_model_len": 256,
            "sampling": {"max_new_tokens": 48},
        },
        "rollout": {"prompts_per_iteration": 4, "group_size": 4},
        # What the engine's log-probabilities are drawn from is no policy.
        "validation": {"recompute_tolerance": None},
        "evaluation": {"every": 0, "before_training": False, "tasks": 1},
        "asynchrony": {"mode": "batch-async", "staleness": bound},
        "train": {"optimizer": {"learning_rate": 3e-4}},
        "tracking": {"enabled": False},
        "infra": {"kind": "local", "state": str(directory / "state")},
    }
    path = directory / f"{run_id}.yaml"
    path.write_text(yaml.safe_dump(settings))
    with (directory / f"{run_id}.log").open("wb") as log:
        command = [str(Path(sys.executable).with_name("roundhouse")), "train", str(path)]
        subprocess.run(command, stdout=log, stderr=log, timeout=RUN_SECONDS, check=True)
    return load_run(str(directory / "store"), run_id)


if __name__ == "__main__":
    main()
