"""Iterations per hour of asynchronous modes against `sync`, over ratios of training to generation.

    python benchmarks/asynchrony.py [--iterations 40] [--seeds 3] [--sigma 1.0]

Assumptions, all of them: rollout lengths are independent and log-normal (sigma 1, median 60 s); 256 rollouts an iteration; a
rollout advances at one speed whatever else its replica runs; a refit takes 5 s, in flight; training takes the same time
every iteration; engine and trainer have machines of their own, and `sync` has the same ones (idle in turns). No faults, no
evaluations.

Three shapes of the engine: `wide` has a slot for each rollout of an iteration, so that an iteration lasts as long as its
slowest rollout; `narrow` has a slot for every fourth, so that slots are taken again and again; `scarce` has one for every
16th, so that the slowest rollout hardly matters. The ratio is training seconds over the seconds in which `sync` generates.
With a long training the trainer is the limit, and no bound can give more than 1 + 1 / ratio; that limit is printed beside.
Speed-ups are means over seeds; the spread is the largest less the smallest. The simulation checks the bound at every step,
and that each rollout is trained once, and ends with an error else. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

from roundhouse.plugins.lab.simulation.run import SimulationResult, simulate
from roundhouse.plugins.lab.simulation.scenario import Scenario, parse_scenario

GROUPS, GROUP_SIZE, REPLICAS = 32, 8, 8
SHAPES = {"wide": 32, "narrow": 8, "scarce": 2}
"""Slots of a replica."""
RATIOS = (0.05, 0.1, 0.25, 0.5, 1.0)
WAYS: list[tuple[str, dict]] = [
    ("batch-async 1", {"mode": "batch-async", "staleness": 1}),
    ("batch-async 2", {"mode": "batch-async", "staleness": 2}),
    ("batch-async 4", {"mode": "batch-async", "staleness": 4}),
    ("batch-async 1, drain", {"mode": "batch-async", "staleness": 1, "refit": "drain"}),
    ("batch-async 4, drain", {"mode": "batch-async", "staleness": 4, "refit": "drain"}),
    ("fully-async 1", {"mode": "fully-async", "staleness": 1}),
    ("fully-async 4", {"mode": "fully-async", "staleness": 4}),
    ("windowed 4 (33)", {"mode": "windowed", "staleness": 4, "window": GROUPS + 1}),
]


def scenario(arguments: argparse.Namespace, slots: int, seed: int, training: float, asynchrony: dict) -> Scenario:
    return parse_scenario(
        {
            "seed": seed,
            "iterations": arguments.iterations,
            "groups": GROUPS,
            "group_size": GROUP_SIZE,
            "asynchrony": asynchrony,
            "rollout": {"kind": "log-normal", "median": 60, "sigma": arguments.sigma},
            "engine": {"replicas": REPLICAS, "slots": slots, "refit_seconds": {"kind": "constant", "value": 5}},
            "trainer": {"seconds": {"kind": "constant", "value": training}},
        }
    )


def generation_seconds(arguments: argparse.Namespace, slots: int, seed: int) -> float:
    """Seconds in which sync generates, an iteration."""
    return simulate(scenario(arguments, slots, seed, 0.0, {"mode": "sync"})).seconds / arguments.iterations - 5


def speedups(
    arguments: argparse.Namespace, slots: int, ratio: float
) -> dict[str, tuple[list[float], list[SimulationResult]]]:
    found: dict[str, tuple[list[float], list[SimulationResult]]] = {name: ([], []) for name, _ in WAYS}
    for seed in range(arguments.seeds):
        training = ratio * generation_seconds(arguments, slots, seed)
        sync = simulate(scenario(arguments, slots, seed, training, {"mode": "sync"}))
        for name, asynchrony in WAYS:
            outcome = simulate(scenario(arguments, slots, seed, training, asynchrony))
            assert max(outcome.ages) <= asynchrony["staleness"]
            found[name][0].append(sync.seconds / outcome.seconds)
            found[name][1].append(outcome)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="only this shape; may be given again")
    arguments = parser.parse_args()
    rows = []
    cpu = time.process_time()
    shapes = {name: slots for name, slots in SHAPES.items() if not arguments.shape or name in arguments.shape}
    for shape, slots in shapes.items():
        print(f"\n{shape}: {REPLICAS} replicas of {slots} slots; speed-up over sync (spread), mean age")
        print(f"{'training : generation':<24}" + "".join(f"{ratio:>22}" for ratio in RATIOS))
        results = {ratio: speedups(arguments, slots, ratio) for ratio in RATIOS}
        print(f"{'limit, 1 + 1 / ratio':<24}" + "".join(f"{1 + 1 / ratio:>21.2f}×" for ratio in RATIOS))
        for name, _ in WAYS:
            line = f"{name:<24}"
            for ratio in RATIOS:
                values, outcomes = results[ratio][name]
                spread, age = max(values) - min(values), statistics.mean(outcome.mean_age for outcome in outcomes)
                line += f"{statistics.mean(values):>8.2f}× (±{spread / 2:.2f}) {age:4.1f}"
                rows.append(
                    {
                        "case": f"{shape}, ratio {ratio}, {name}",
                        "value": round(statistics.mean(values), 3),
                        "unit": "× sync",
                        "peer": "sync",
                        "ratio": round(statistics.mean(values), 3),
                        "spread": round(spread, 3),
                        "mean_age": round(age, 3),
                    }
                )
            print(line, flush=True)
    simulated = (
        len(shapes) * len(RATIOS) * arguments.seeds * (len(WAYS) + 2) * arguments.iterations * GROUPS * GROUP_SIZE
    )
    spent = time.process_time() - cpu
    print(f"\n{simulated} rollouts simulated in {spent:.0f} CPU s: {1e6 * spent / simulated:.0f} µs each")
    rows.append(
        {
            "case": "CPU of a simulated rollout",
            "value": round(1e6 * spent / simulated, 1),
            "unit": "µs",
            "peer": None,
            "ratio": None,
        }
    )
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    print("\n" + json.dumps({"bench": "async", "results": rows, "machine": machine}))


if __name__ == "__main__":
    main()
