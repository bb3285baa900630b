"""Real overlapped runs: a policy, a Prefect server, and an engine that only takes time."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from roundhouse.config.included_environments import CalculatorEnvironment
from roundhouse.config.training import WarmStartPolicy
from roundhouse.environments import load
from roundhouse.infra import services
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.store.run import Run, load_run
from tests.chaos.stand import Server
from tests.chaos.strikes import PLAN_VARIABLE, Strike
from tests.chaos.strikes import Plan as StrikePlan
from tests.fork_server import ForkServer

TASKS, SIZE, ITERATIONS, STALENESS = 3, 2, 4, 1
SECONDS = 240.0
"""For a run of seconds, on however busy a machine."""


@dataclass
class Place:
    """A directory with a policy, a Prefect server, and an engine that takes its time."""

    directory: Path
    fork_server: ForkServer
    variables: dict[str, str]
    engine: Server | None = None

    def start_engine(self, name: str, median: float) -> Server:
        slow = ["--median", str(median), "--sigma", "0.8", "--refit", "0.05"]
        log = self.directory / f"{name}.log"
        started = Server(
            name, ["-m", "benchmarks.timed_engine", *slow], log, "/rh/replicas", fork_server=self.fork_server
        )
        started.start()
        started.wait_until_it_answers()
        return started

    def train(self, run_id: str, strike: Strike | None = None, **keys: object) -> subprocess.Popen[bytes]:
        """Start `roundhouse train`, with a kill planted where there is a strike."""
        path = self.directory / f"{run_id}.yaml"
        path.write_text(yaml.safe_dump(self.settings(run_id) | keys))
        variables = self.variables | {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        if strike is not None:
            plan = self.directory / f"{run_id}-plan.json"
            StrikePlan((strike,), self.directory / f"{run_id}-struck").save(plan)
            variables |= {PLAN_VARIABLE: str(plan)}
        module = "tests.chaos.planted" if strike else "roundhouse.cli"
        return self.fork_server.start(module, ["train", str(path)], self.log(run_id), variables)

    def log(self, run_id: str) -> Path:
        return self.directory / f"{run_id}.log"

    def run(self, run_id: str, store: str | None = None) -> Run:
        return load_run(store or str(self.directory / "store"), run_id)

    def settings(self, run_id: str) -> dict[str, Any]:
        assert self.engine is not None
        return {
            "run_id": run_id,
            "iterations": ITERATIONS,
            "store": str(self.directory / "store"),
            "policy": {"kind": "pretrained", "path": str(self.directory / "policy")},
            "generation": {
                "backend": "transformers",
                "engine_url": self.engine.url,
                "max_model_len": 256,
                "sampling": {"max_new_tokens": 48},
                "request_timeout_seconds": 20,
            },
            "rollout": {"prompts_per_iteration": TASKS, "group_size": SIZE, "concurrency": 2},
            # What the engine's log-probabilities are drawn from is no policy.
            "validation": {"recompute_tolerance": None},
            "evaluation": {"every": 2, "tasks": 2, "before_training": False},
            "asynchrony": {"mode": "batch-async", "staleness": STALENESS},
            "train": {"optimizer": {"learning_rate": 3e-4}},
            "tracking": {"enabled": False},
            "infra": {"kind": "local", "state": str(self.directory / "state")},
        }

    def task_runs(self, run_id: str, *states: str) -> list[dict[str, Any]]:
        """The run's task runs, as Prefect has them, in these states, or in any."""
        ids = [flow["id"] for flow in self.flow_runs(run_id)]
        asked: dict[str, Any] = {"flow_run_id": {"any_": ids}}
        if states:
            asked["state"] = {"type": {"any_": list(states)}}
        return self._ask("/task_runs/filter", task_runs=asked)

    def flow_runs(self, run_id: str) -> list[dict[str, Any]]:
        """The run's flow runs, as Prefect has them."""
        return self._ask("/flow_runs/filter", flow_runs={"tags": {"all_": [f"run:{run_id}"]}})

    def _ask(self, path: str, **body: Any) -> list[dict[str, Any]]:
        auth = httpx.BasicAuth(*self.variables["PREFECT_API_AUTH_STRING"].split(":"))
        with httpx.Client(base_url=self.variables["PREFECT_API_URL"], auth=auth, timeout=30) as client:
            return client.post(path, json=body | {"limit": 200}).raise_for_status().json()


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Place]:
    """The place, with everything at work; ended with the block."""
    small = WarmStartPolicy(hidden_size=16, layers=1, heads=1, head_dim=16, intermediate_size=32, steps=5)
    made: Place | None = None
    try:
        running = services.up(directory / "state" / "services", ("prefect",))
        quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
        variables = os.environ | running.environment() | quiet  # Prefect reads them when it is imported
        fork_server = ForkServer.spawn(directory / "fork_server.log", variables)
        made = Place(directory, fork_server, variables)
        make_starting_policy(small, load(CalculatorEnvironment()), 0, directory / "policy")
        made.engine = made.start_engine("engine", 0.3)
        yield made
    finally:
        services.down(directory / "state" / "services")
        if made is not None:
            if made.engine is not None:
                made.engine.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends when the machine lets it
                made.fork_server.close()
