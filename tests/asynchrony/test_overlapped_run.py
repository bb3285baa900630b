"""A real run that collects while it trains: real flows, Prefect server, store and trainer; the engine only takes time.

It is killed in the overlap, while step 2 is about to be committed and rollouts of iteration 3 are under way, and started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from roundhouse.asynchrony import events as happened
from roundhouse.asynchrony.journal import Journal
from roundhouse.asynchrony.plan import Plan
from roundhouse.config.environments import CalculatorEnvironment
from roundhouse.config.policies import WarmStartPolicy
from roundhouse.gym.environments import load
from roundhouse.infra import services
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.run import Run, load_run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import Status
from tests.chaos.nursery import Child, Nursery
from tests.chaos.stand import Server
from tests.chaos.strikes import PLAN_VARIABLE, Strike
from tests.chaos.strikes import Plan as StrikePlan

pytestmark = pytest.mark.timeout(900)

TASKS, SIZE, ITERATIONS, STALENESS = 3, 2, 4, 1
SECONDS = 240.0
"""For a run of seconds, on however busy a machine."""


@dataclass
class Place:
    """A directory with a policy, a Prefect server, and an engine that takes its time."""

    directory: Path
    nursery: Nursery
    variables: dict[str, str]
    engine: Server | None = None

    def start_engine(self, name: str, median: float) -> Server:
        slow = ["--median", str(median), "--sigma", "0.8", "--refit", "0.05"]
        log = self.directory / f"{name}.log"
        started = Server(name, ["-m", "benchmarks.timed_engine", *slow], log, "/rh/replicas", nursery=self.nursery)
        started.start()
        started.wait_until_it_answers()
        return started

    def train(self, run_id: str, plan: Path | None = None, **keys: object) -> Child:
        """Start `roundhouse train`, with kills planted where there is a plan."""
        path = self.directory / f"{run_id}.yaml"
        path.write_text(yaml.safe_dump(self.settings(run_id) | keys))
        module = "tests.chaos.planted" if plan else "roundhouse.cli"
        variables = self.variables | ({PLAN_VARIABLE: str(plan)} if plan else {})
        return self.nursery.start(module, ["train", str(path)], self.log(run_id), variables)

    def log(self, run_id: str) -> Path:
        return self.directory / f"{run_id}.log"

    def run(self, run_id: str) -> Run:
        return load_run(str(self.directory / "store"), run_id)

    def settings(self, run_id: str) -> dict[str, object]:
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
            "rollout": {"tasks": TASKS, "group_size": SIZE, "concurrency": 2},
            # What the engine's log-probabilities are drawn from is no policy.
            "validation": {"recompute_tolerance": None},
            "evaluation": {"every": 2, "tasks": 2, "before_training": False},
            "asynchrony": {"mode": "batch-async", "staleness": STALENESS},
            "tracking": {"enabled": False},
            "infra": {"kind": "local", "state": str(self.directory / "state")},
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("overlapped")
    small = WarmStartPolicy(hidden_size=16, layers=1, heads=1, head_dim=16, intermediate_size=32, steps=5)
    made: Place | None = None
    try:
        running = services.up(directory / "state" / "services", ("prefect",))
        quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
        variables = os.environ | running.environment() | quiet  # Prefect reads them when it is imported
        nursery = Nursery(directory / "nursery.log", variables)
        made = Place(directory, nursery, variables)
        make_starting_policy(small, load(CalculatorEnvironment()), 0, directory / "policy")
        made.engine = made.start_engine("engine", 0.3)
        yield made
    finally:
        services.down(directory / "state" / "services")
        if made is not None:
            if made.engine is not None:
                made.engine.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends when the machine lets it
                made.nursery.close()


@pytest.fixture(scope="module")
def killed_and_resumed(place: Place) -> Run:
    """The run, finished after a kill in the overlap."""
    strike = Strike("flow", "create iterations/000002/train/manifest.json", "before")
    plan = place.directory / "plan.json"
    StrikePlan((strike,), place.directory / "struck").save(plan)
    assert place.train("run", plan).wait(SECONDS) == -signal.SIGKILL, place.log("run").read_text()
    run = place.run("run")
    assert run.stage(2, "train").reference() is None
    assert run.stage(3, "collect").location.exists("attempt-0001.json"), "collect 3 was under way beside step 2"
    assert place.train("run").wait(SECONDS) == 0, place.log("run").read_text()
    return run


def test_after_a_kill_in_the_overlap_every_rollout_is_trained_on_once_by_its_own_iteration(
    killed_and_resumed: Run,
) -> None:
    run, plan = killed_and_resumed, Plan(killed_and_resumed.config)
    assert run.latest_checkpoint().policy_version == ITERATIONS
    for k in range(1, ITERATIONS + 1):
        rollouts = read_rollouts(run.stage(k, "collect").reference())
        assert sorted(r.rollout_id for r in rollouts) == sorted(spec.rollout_id for spec in plan.specs(k))
        assert {r.rollout_id: r.seed for r in rollouts} == {spec.rollout_id: spec.seed for spec in plan.specs(k)}
        sequences = read_table(run.stage(k, "validate").reference(), "sequences")
        counted = Counter(sequences.column("rollout_id").to_pylist())
        assert max(counted.values()) == 1
        train = read_manifest(run.stage(k, "train").reference())
        assert train.inputs["sequences"] == run.stage(k, "validate").reference()
        finished = {r.rollout_id for r in rollouts if r.status in (Status.COMPLETED, Status.TRUNCATED)}
        assert counted.keys() == finished
    assert verify(str(run.location.uri).split("/runs/")[0]).problems == []


def test_no_token_is_older_than_the_bound_and_some_are_as_old(killed_and_resumed: Run) -> None:
    ages = Counter()
    for k in range(1, ITERATIONS + 1):
        reference = killed_and_resumed.stage(k, "collect").reference()
        ages += Counter(k - 1 - turn.policy_version for r in read_rollouts(reference) for turn in r.turns)
        manifest = read_manifest(killed_and_resumed.stage(k, "train").reference())
        assert manifest.metrics["staleness/age_max"] <= STALENESS
    assert set(ages) == {0, STALENESS}


def test_the_journal_tells_of_both_starts_and_of_each_step_once(killed_and_resumed: Run) -> None:
    events = list(Journal(killed_and_resumed.location / "asynchrony").events())
    finished = [event.iteration for event in events if isinstance(event, happened.TrainingFinished)]
    assert finished == list(range(1, ITERATIONS + 1))
    started = Counter(event.iteration for event in events if isinstance(event, happened.TrainingStarted))
    assert started[2] == 2, "step 2 was begun again, on the same groups"
    assert sum(isinstance(event, happened.Restarted) for event in events) == 2
    evaluated = [event.version for event in events if isinstance(event, happened.ValidationEnded)]
    assert evaluated == [2], "the last version's is outside of the plan"


def test_prefect_shows_collect_of_the_next_iteration_beside_a_step(killed_and_resumed: Run, place: Place) -> None:
    found = _task_runs(place, "run")
    collect, step = found["collect 2"], found["train 1"]
    assert collect[0] < step[1], "it began before the step ended"
    assert step[0] < collect[1], "and ended after the step had begun"


def test_an_engine_that_dies_in_the_overlap_ends_both_lanes(place: Place) -> None:
    """Nothing hangs: the generation lane's error is the run's."""
    engine = place.start_engine("engine-2", 0.3)
    try:
        generation = place.settings("dies")["generation"] | {"engine_url": engine.url}
        rollout = {"tasks": TASKS, "group_size": SIZE, "concurrency": 2, "retry": {"attempts": 1}}
        process = place.train("dies", generation=generation, rollout=rollout)
        _until(lambda: (place.directory / "store/runs/dies/checkpoints/000001/manifest.json").exists(), process)
        engine.stop()
        assert process.wait(SECONDS) == 1
        said = place.log("dies").read_text()
        assert "does not answer" in said or "rollouts failed" in said
    finally:
        engine.stop()
    assert place.run("dies").latest_checkpoint().policy_version >= 1


def test_with_staleness_0_a_run_is_the_synchronous_one_bit_for_bit(place: Place) -> None:
    modes = {"plain": {"mode": "sync"}, "bound-0": {"mode": "batch-async", "staleness": 0}}
    runs = {}
    for name, asynchrony in modes.items():
        assert place.train(name, asynchrony=asynchrony, iterations=2).wait(SECONDS) == 0, place.log(name).read_text()
        runs[name] = place.run(name)
    plain, bounded = runs["plain"], runs["bound-0"]
    assert not bounded.location.exists("asynchrony/events-00000001.jsonl")
    for k in (1, 2):
        answers = [
            {
                r.rollout_id: [turn.generation_token_ids for turn in r.turns]
                for r in read_rollouts(run.stage(k, "collect").reference())
            }
            for run in (plain, bounded)
        ]
        assert answers[0] == answers[1]
        weights = [
            {
                entry.path: entry.sha256
                for entry in read_manifest(run.checkpoint(k).reference()).files
                if entry.path.endswith(".safetensors")
            }
            for run in (plain, bounded)
        ]
        assert weights[0] == weights[1]
        assert weights[0]


def _until(holds: Callable[[], bool], process: Child) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _task_runs(place: Place, run_id: str) -> dict[str, tuple[str, str]]:
    """Begin and end of the run's task runs, by name, as Prefect has them."""
    found: dict[str, tuple[str, str]] = {}
    with httpx.Client(base_url=place.variables["PREFECT_API_URL"], timeout=30) as client:
        flows = client.post(
            "/flow_runs/filter", json={"flow_runs": {"tags": {"all_": [f"run:{run_id}"]}}, "limit": 200}
        ).json()
        ids = [flow["id"] for flow in flows]
        runs = client.post(
            "/task_runs/filter",
            json={
                "task_runs": {"flow_run_id": {"any_": ids}, "state": {"type": {"any_": ["COMPLETED"]}}},
                "limit": 200,
            },
        ).json()
    for task in runs:
        with contextlib.suppress(TypeError):
            found[task["name"]] = (task["start_time"], task["end_time"])
    return found
