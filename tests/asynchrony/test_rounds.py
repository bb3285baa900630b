"""Dynamic sampling while training: real loops, store, controller and both runners. The engine answers by the digits and the
seed, with the version that it was given, so that every run of the same seed draws the same rounds."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import PLACE, ControllerJournal
from roundhouse.collection.asynchronous.overlap import BeginCollect, Overlap
from roundhouse.collection.asynchronous.plan import Plan
from roundhouse.collection.collector import written_rollouts
from roundhouse.collection.runner import ENGINE
from roundhouse.config.loading import parse_config
from roundhouse.errors import TooFewRollouts, TooFewSequences
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.prefetch import prefetch_rollouts
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import derive_seed
from tests import fork_server
from tests.asynchrony.test_rolling_shards import PATIENCE, check_journal, publish
from tests.asynchrony.test_rolling_shards import threads as threads
from tests.stages.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.stages.test_dynamic_sampling import GROUP, TASKS, sorted_sometimes
from tests.waiting import until

pytestmark = pytest.mark.real

ITERATIONS = 3
RUNNERS = {"in process": {}, "shards": {"distribution": {"kind": "process", "shards": 2}}}


class VersionedAnswer(ScriptedAnswer):
    server: VersionedEngine

    def send(self, status: int, body: dict[str, Any]) -> None:
        super().send(status, body | ({"policy_version": self.server.version} if status == 200 else {}))


class VersionedEngine(ScriptedEngine):
    """After `answers` answers it is silent until `go_on`; calls with a seed in `failing` are cut off."""

    version = 0

    def __init__(self) -> None:
        super().__init__(self.sort)
        self.RequestHandlerClass = VersionedAnswer
        self.answers = 10**6
        self.failing: set[int] = set()
        self.go_on = threading.Event()

    def sort(self, request: dict[str, Any]) -> str:
        if request["seed"] in self.failing:
            self.requests.remove(request)
            raise ConnectionAbortedError
        if len(self.requests) > self.answers:
            self.requests.remove(request)
            self.go_on.wait(PATIENCE)
        return sorted_sometimes(request)


@pytest.fixture
def engine() -> Iterator[VersionedEngine]:
    with VersionedEngine().serving() as server:
        yield server
        server.go_on.set()


def settings(store: Path, runner: str, staleness: int = 1, **sampling: Any) -> dict[str, Any]:
    rollout = {"prompts_per_iteration": TASKS, "group_size": GROUP, "concurrency": 4, "max_failed_fraction": 0.0}
    rollout |= {"retry": {"attempts": 1, "first_delay_seconds": 0.01}, "dynamic_sampling": sampling, **RUNNERS[runner]}
    asynchrony = {"mode": "batch-async" if staleness else "sync", "staleness": staleness}
    return {
        "run_id": "r",
        "store": str(store),
        "iterations": ITERATIONS,
        "rollout": rollout,
        "asynchrony": asynchrony,
        "environment": {"kind": "sort", "digits": 4},
        "evaluation": {"every": 0},
        "validation": {"check_text": False},
    }


def begun(tree: dict[str, Any]) -> Run:
    run = open_run(parse_config(tree))
    if run.latest_checkpoint() is None:
        publish(run, 0)
    return run


class Loops:
    """One life of both loops; the generation loop in a thread, training done by the test."""

    def __init__(self, run: Run, engine_url: str, transfer: Callable[[int], None] = lambda _: None) -> None:
        self.run, self.overlap, self._transfer = run, Overlap(run, engine_url), transfer
        self._threads = [threading.Thread(target=self._generate, daemon=True)]
        self._threads[0].start()

    def _generate(self) -> None:
        error: BaseException | None = None
        try:
            for order in self.overlap.orders():
                if isinstance(order, BeginCollect):
                    self._threads.append(threading.Thread(target=self._collect, args=(order.iteration,), daemon=True))
                    self._threads[-1].start()
                elif order is not None:
                    self._transfer(order.version)
                    self.overlap.transferred(order.version)
        except BaseException as raised:  # noqa: BLE001 - raised in the training loop
            error = raised
        self.overlap.end(error)

    def _collect(self, iteration: int) -> None:
        try:
            prefetch_rollouts(self.run, iteration, self.overlap.runner)
        except Exception as error:  # noqa: BLE001 - raised in the training loop
            self.overlap.failed(iteration, error)

    def train(self, k: int) -> set[str]:
        """The groups that step k trains on."""
        collected = self.overlap.collected(k)
        with self.overlap.training(k):
            validated = validate_iteration(self.run, k, collected, vocabulary_size=10)
            publish(self.run, k)
        return set(read_table(validated, "sequences").column("group_id").to_pylist())

    def end(self) -> None:
        self.overlap.stop()
        for thread in self._threads:
            thread.join(PATIENCE)


def dataset(run: Run, k: int) -> dict[str, Any]:
    """Return the part of the dataset that is independent of the order of events."""
    reference = run.stage(k, "collect").reference()
    assert reference is not None
    manifest, rollouts = read_manifest(reference), read_rollouts(reference)
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == manifest.counts["requested"]
    return {
        "rollouts": {rollout.rollout_id: (rollout.seed, rollout.reward) for rollout in rollouts},
        "sampling": manifest.details["dynamic_sampling"],
        "metrics": {name: value for name, value in manifest.metrics.items() if name.startswith("dynamic_sampling/")},
    }


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The datasets of a synchronous run of the same seed."""
    run = begun(settings(tmp_path_factory.mktemp("sync"), "in process", staleness=0))
    with VersionedEngine().serving() as engine:
        for k in range(1, ITERATIONS + 1):
            weights = run.begin(run.stage(k, "refit"), policy_version=0).commit()
            collect_iteration(run, k, weights, engine.url)
    return [dataset(run, k) for k in range(1, ITERATIONS + 1)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("threads")
def test_iterations_draw_the_rounds_of_a_synchronous_run_and_train_on_the_groups_that_it_keeps(
    tmp_path: Path, engine: VersionedEngine, synchronous: list[dict[str, Any]], runner: str
) -> None:
    """No group of the first round of iteration 1 has spread."""
    assert [each["sampling"]["rounds"] for each in synchronous] == [4, 3, 3]
    run = begun(settings(tmp_path, runner))
    loops = Loops(run, engine.url, lambda version: setattr(engine, "version", version))
    for k, expected in enumerate(synchronous, 1):
        kept = loops.train(k)
        assert dataset(run, k) == expected
        assert kept == set(expected["sampling"]["kept"])
        assert len(kept) == TASKS
        ages = {
            k - 1 - turn.policy_version for r in read_rollouts(run.stage(k, "collect").reference()) for turn in r.turns
        }
        assert ages <= {0, 1}
    loops.end()
    assert len(engine.seeds) == len(set(engine.seeds)) == sum(len(each["rollouts"]) for each in synchronous)
    events = check_journal(run)
    started = [event.iteration for event in events if isinstance(event, happened.RoundStarted)]
    rounds = [each["sampling"]["rounds"] for each in synchronous]
    assert sorted(started) == [k for k, count in enumerate(rounds, 1) for _ in range(count - 1)]
    assert verify(str(tmp_path)).problems == []


KILLED = """
import json, sys
from pathlib import Path
from roundhouse.collection import collector
collector.FLUSH_SECONDS = 0.05
from tests.asynchrony.test_rounds import Loops, begun
Loops(begun(json.loads(sys.argv[1])), sys.argv[2]).overlap.collected(1)
"""


@pytest.mark.parametrize(
    ("runner", "loss"),
    [
        ("in process", "nothing"),
        ("in process", "journal"),
        ("in process", "part"),
        ("shards", "journal"),
    ],
)
def test_a_run_that_is_killed_in_a_second_round_draws_the_same_and_makes_only_what_is_missing(
    tmp_path: Path, engine: VersionedEngine, synchronous: list[dict[str, Any]], runner: str, loss: str
) -> None:
    """Also where the end of the journal is lost, so that only the store knows of the second round, or a part of the first."""
    assert synchronous[0]["sampling"]["rounds"] > 2
    tree = settings(tmp_path, runner) | {"iterations": 1}
    run = begun(tree)
    place, engine.answers = run.location / PLACE, TASKS * GROUP + 5
    process = fork_server.start([sys.executable, "-c", KILLED, json.dumps(tree), engine.url], env=os.environ)
    try:
        stage = run.stage(1, "collect").location
        until(lambda: len(written_rollouts(stage)) > TASKS * GROUP)
        until(lambda: any(isinstance(e, happened.RoundStarted) for e in ControllerJournal(place).events()))
    finally:
        process.kill()
        process.wait()
    if loss == "journal":
        forget_rounds(run)
    elif loss == "part":
        damage(run, Plan(run).spec((0, 0)).rollout_id)
    there = len(written_rollouts(stage))
    engine.answers = 10**6
    engine.go_on.set()
    asked = len(engine.requests)

    loops = Loops(begun(tree), engine.url)
    assert loops.train(1) == set(synchronous[0]["sampling"]["kept"])
    loops.end()
    assert dataset(run, 1) == synchronous[0]
    assert len(engine.requests) - asked <= len(synchronous[0]["rollouts"]) - there
    rounds = [event.number for event in check_journal(run) if isinstance(event, happened.RoundStarted)]
    assert rounds == ([2, 2, 3, 4] if loss == "part" else [2, 3, 4])
    assert verify(str(tmp_path)).problems == []


def damage(run: Run, rollout_id: str) -> None:
    """The part that holds a rollout."""
    place = run.stage(1, "collect").location
    for name in place.names():
        if name.startswith("rollouts-") and rollout_id.encode() in place.read(name):
            place.write(name, b"damaged")


def forget_rounds(run: Run) -> None:
    """Delete the journal's segments from the first started round on."""
    place = run.location / PLACE
    segments = sorted(name for name in place.names() if name.startswith("events-"))
    first = next(n for n, name in enumerate(segments) if b"RoundStarted" in place.read(name))
    for name in segments[first:]:
        place.delete(name)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("threads")
def test_rounds_that_are_exhausted_fail_the_stage_or_are_trained_on_as_configured(
    tmp_path: Path, engine: VersionedEngine, runner: str
) -> None:
    loops = Loops(begun(settings(tmp_path / "a", runner, max_rounds=2)), engine.url)
    with pytest.raises(TooFewSequences, match=r"1 of 3 groups have spread after 2 rounds .*max_rounds"):
        loops.train(1)
    loops.end()
    run = begun(settings(tmp_path / "b", runner, max_rounds=2, on_exhausted="continue"))
    loops = Loops(run, engine.url)
    assert loops.train(1) == set(dataset(run, 1)["sampling"]["kept"])
    assert len(dataset(run, 1)["sampling"]["kept"]) == 1
    loops.end()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("threads")
def test_no_further_round_is_drawn_when_too_many_rollouts_of_one_failed_and_the_next_attempt_draws_the_same(
    tmp_path: Path, engine: VersionedEngine, synchronous: list[dict[str, Any]], runner: str
) -> None:
    run = begun(settings(tmp_path, runner) | {"iterations": 1})
    engine.healthy = 5
    loops = Loops(run, engine.url)
    with pytest.raises(TooFewRollouts, match="12 rollouts failed"):
        loops.train(1)
    loops.end()
    assert not any(isinstance(event, happened.RoundStarted) for event in check_journal(run))
    engine.healthy = 10**6
    loops = Loops(run, engine.url)
    loops.train(1)
    loops.end()
    assert dataset(run, 1) == synchronous[0]
    assert len(engine.seeds) == len(set(engine.seeds)), "what had finished is not made again"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.usefixtures("threads")
def test_an_attempt_after_one_that_failed_in_its_second_round_repeats_what_failed_in_the_first_and_decides_again(
    tmp_path: Path, engine: VersionedEngine, synchronous: list[dict[str, Any]], runner: str
) -> None:
    tree = settings(tmp_path, runner) | {"iterations": 1}
    tree["rollout"]["max_failed_fraction"] = 1 / (TASKS * GROUP)
    overlap = Overlap(begun(tree), engine.url)
    run, plan = overlap.run, overlap.plan
    engine.failing = {derive_seed(spec.seed, 0) for spec in (plan.spec((0, 0)), *plan.specs(1, 2))}
    overlap.runner.start()
    overlap.dispatch.tell(happened.TransferStarted(ENGINE, 0), happened.TransferFinished(ENGINE, 0))
    with pytest.raises(TooFewRollouts, match="12 of 12 rollouts failed"):
        prefetch_rollouts(run, 1, overlap.runner)
    engine.failing = set()
    prefetch_rollouts(run, 1, overlap.runner)
    overlap.runner.stop()
    assert dataset(run, 1) == synchronous[0]
    rounds = [event.number for event in check_journal(run) if isinstance(event, happened.RoundStarted)]
    assert rounds == [2, 2, 3, 4]
