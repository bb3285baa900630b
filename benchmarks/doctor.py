"""Forecasts of `roundhouse runs doctor` beside the real runs with the change made.

    python -m benchmarks.doctor [--iterations 8] [--only queued] [--pace 0.5] [--at-once 7] [--directory DIR]

Each workload is trained as it is and once more with each change that can be made to it; the doctor sees the first run alone.
Real: `roundhouse train` with its flows, Prefect, store, collection, environment and trainer. They wait and hardly compute
(`timed_engine.py`, `waiting.py`), so that two cores hold several runs at once and the result is about the forecast, not about
who else used the machine. Engine, tools, verifier, loss and store take random seconds; the run's seed is the same before and
after, as when a user changes one key. Compared are mean seconds of an iteration from the second on. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.soak import small_policy
from benchmarks.waiting import OPERATION_SECONDS, TOKEN_SECONDS
from roundhouse.infra import services
from roundhouse.plugins.lab.simulation.doctor import Diagnosis, diagnose
from roundhouse.stages.report import iteration_manifests
from roundhouse.store.run import Run, load_run
from tests.chaos.stand import Server
from tests.fork_server import ForkServer

RUN_SECONDS = 1500.0
WITHIN = 0.1
"""Of the real seconds: a forecast that is right."""
AHEAD = {"mode": "batch-async", "staleness": 1}


@dataclass(frozen=True)
class Workload:
    """What a run waits for; seconds are medians."""

    concurrency: int = 16
    turn: float = 1.0
    sigma: float = 0.6
    load: float = 0.0
    refit: float = 0.1
    tool: float = 0.0
    verify: float = 0.0
    token: float = 0.0
    """Of training, a token."""
    ranks: int = 1
    operation: float = 0.0
    """Of the store."""
    asynchrony: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, change: str) -> Workload:
        """With the doctor's change made."""
        changes: dict[str, dict[str, Any]] = {
            "concurrency": {"concurrency": 2 * self.concurrency},
            "staleness": {"asynchrony": AHEAD},
            "trainer ranks": {"ranks": 2 * self.ranks},
            "storage": {"operation": self.operation / 2},
        }
        return replace(self, **changes[change])

    def changes(self) -> list[str]:
        """Those that can be made here."""
        possible = {
            "concurrency": self.concurrency < 16,
            "staleness": True,
            "trainer ranks": self.token > 0.004,  # what takes a tenth of the time gains nothing that could be seen
            "storage": self.operation > 0,
        }
        return [change for change, can in possible.items() if can]

    def settings(self, pace: float) -> dict[str, Any]:
        parameters = {"tool_seconds": pace * self.tool, "verify_seconds": pace * self.verify}
        target = f"{Path(__file__).with_name('waiting.py')}:SlowCalculator"
        algorithm = {"kind": "grpo"} | ({"policy_loss": "benchmarks.waiting:waiting_loss"} if self.token else {})
        return {
            "environment": {"kind": "custom", "target": target, "parameters": parameters},
            "rollout": {"prompts_per_iteration": 4, "group_size": 4, "concurrency": self.concurrency},
            "train": {
                "minibatches": 1,
                "service": {"kind": "resident", "processes": self.ranks},
                "algorithm": algorithm,
            },
            "asynchrony": dict(self.asynchrony),
        }


WORKLOADS = {
    "queued": Workload(concurrency=4, turn=3.0),
    "slow verifier": Workload(concurrency=4, turn=0.6, tool=1.2, verify=3.6, token=0.001),
    "loaded engine": Workload(concurrency=4, turn=1.8, load=0.12),
    "few long rollouts": Workload(turn=3.0, sigma=1.1, token=0.0045),
    "trainer": Workload(turn=1.2, token=0.016),
    "even": Workload(turn=3.0, token=0.0095),
    "slow store": Workload(turn=1.6, operation=0.06),
    "queued, long trained": Workload(concurrency=6, turn=2.5, token=0.007),
}
TOKENS = 60
"""Of an answer, in the median."""


@dataclass(frozen=True)
class Stand:
    """What all runs share."""

    directory: Path
    fork_server: ForkServer
    iterations: int
    pace: float

    def train(self, name: str, workload: Workload) -> tuple[str, str]:
        """The run, made to its end: its store and id."""
        place = self.directory / name.replace(" ", "-").replace(",", "")
        place.mkdir(exist_ok=True)
        variables = os.environ | {
            TOKEN_SECONDS: f"{self.pace * workload.token}",
            OPERATION_SECONDS: f"{self.pace * workload.operation}",
        }
        with ExitStack() as servers:
            seconds = {"median": workload.turn, "refit": workload.refit, "token": workload.turn / TOKENS}
            arguments = [text for key, value in seconds.items() for text in (f"--{key}", f"{self.pace * value}")]
            arguments += ["--sigma", f"{workload.sigma}", "--load", f"{workload.load}"]
            log = place / "engine.log"
            engine = self._serve(servers, "benchmarks.timed_engine", arguments, log, "/rh/replicas", variables)
            store = str(place / "store")
            settings = workload.settings(self.pace) | {
                "run_id": place.name,
                "iterations": self.iterations,
                "store": store,
                "policy": {"kind": "pretrained", "path": str(self.directory / "policy")},
                "generation": {
                    "backend": "transformers",
                    "engine_url": engine.url,
                    "max_model_len": 4096,
                    "sampling": {"max_new_tokens": 900},
                },
                # What the engine's log-probabilities are drawn from is no policy.
                "validation": {"recompute_tolerance": None},
                "evaluation": {"every": None, "before_training": False},
                "tracking": {"enabled": False},
                "infra": {"kind": "local", "state": str(self.directory / "state")},
            }
            (place / "run.yaml").write_text(yaml.safe_dump(settings))
            child = self.fork_server.start(
                "benchmarks.waiting", ["train", str(place / "run.yaml")], place / "run.log", variables
            )
            try:
                if child.wait(RUN_SECONDS):
                    raise RuntimeError(f"{name} has failed:\n{(place / 'run.log').read_text()[-3000:]}")
            finally:
                child.kill()
        return store, place.name

    def _serve(
        self, servers: ExitStack, module: str, arguments: list[str], log: Path, health: str, variables: dict[str, str]
    ) -> Server:
        server = Server(module, ["-m", module, *arguments], log, health, dict(variables), fork_server=self.fork_server)
        server.start()
        servers.callback(server.stop)
        server.wait_until_it_answers()
        return server


@contextmanager
def stand(directory: Path, iterations: int, pace: float) -> Iterator[Stand]:
    """Prefect, and a process that forks with everything imported."""
    small_policy(directory / "policy")
    state = directory / "state" / "services"
    running = services.up(state, ("prefect",))
    quiet = {"HF_HUB_OFFLINE": "1", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
    fork_server = ForkServer.spawn(directory / "fork_server.log", os.environ | running.environment() | quiet)
    try:
        os.environ.update(running.environment() | quiet)
        yield Stand(directory, fork_server, iterations, pace)
    finally:
        fork_server.close()
        services.down(state)


def seconds_of(run: Run) -> float:
    """Mean seconds of an iteration from the second on, report to report."""
    ended = [iteration_manifests(run, k)["report"].finished_at for k in range(1, run.config.iterations + 1)]
    return (ended[-1] - ended[0]) / (len(ended) - 1)


def compare(name: str, before: Diagnosis, after: dict[str, float]) -> tuple[list[dict[str, Any]], bool]:
    """The rows of one workload, best forecast first, and whether the change recommended among those tried is the best."""
    print(f"\n{name}: {before.seconds:.2f} s an iteration ({before.simulated:.2f} simulated), {before.binds} binds")
    forecasts = [each for each in before.changes if each.change in after]
    rows = []
    for each in forecasts:
        real = after[each.change]
        told = f"{each.seconds:>8.2f} foretold ± {each.error:.2f}"
        print(f"  {each.change:<16}{told}{real:>8.2f} real{each.seconds / real - 1:>+8.1%}")
        rows.append(
            {
                "case": f"{name}, {each.change}",
                "value": round(real, 3),
                "unit": "s",
                "foretold": round(each.seconds, 3),
                "before": round(before.seconds, 3),
                "off": round(each.seconds / real - 1, 4),
            }
        )
    best = min(after, key=after.__getitem__)
    print(f"  recommended: {forecasts[0].change}, best: {best}")
    return rows, forecasts[0].change == best


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=8, help="the first is not counted")
    parser.add_argument("--only", nargs="*", default=[""], help="workloads whose names have one of these in them")
    parser.add_argument("--pace", type=float, default=1.0, help="factor of all latencies")
    parser.add_argument("--at-once", type=int, default=7, help="runs that are made beside each other")
    parser.add_argument("--directory", type=Path, help="keep everything here")
    options = parser.parse_args()
    chosen = {name: each for name, each in WORKLOADS.items() if any(part in name for part in options.only)}
    with tempfile.TemporaryDirectory(prefix="rh-") as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        with stand(directory, options.iterations, options.pace) as shared, ThreadPoolExecutor(options.at_once) as pool:
            runs = {
                (name, change): pool.submit(
                    shared.train, f"{name} {change}".strip(), each.changed(change) if change else each
                )
                for name, each in chosen.items()
                for change in ("", *each.changes())
            }
            results: list[dict[str, Any]] = []
            recommended: list[float] = []
            right = 0
            for name, each in chosen.items():
                done = {change: load_run(*runs[name, change].result()) for change in ("", *each.changes())}
                after = {change: seconds_of(run) for change, run in done.items() if change}
                rows, best = compare(name, diagnose(done[""]), after)
                results, right = results + rows, right + best
                recommended.append(abs(rows[0]["off"]))
                sys.stdout.flush()
    off = [abs(row["off"]) for row in results]
    summary = [
        ("recommended changes foretold within 10 %", sum(each <= WITHIN for each in recommended), f"of {len(chosen)}"),
        ("all changes foretold within 10 %", sum(each <= WITHIN for each in off), f"of {len(off)}"),
        ("recommended change is the best one tried", right, f"of {len(chosen)}"),
        ("median error of a forecast", round(statistics.median(off), 4), "share"),
    ]
    results += [{"case": case, "value": value, "unit": unit} for case, value, unit in summary]
    for case, value, unit in summary:
        print(f"{case:<44}{value} {unit}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"bench": "doctor", "results": results, "machine": machine}))


if __name__ == "__main__":
    main()
