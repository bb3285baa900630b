"""A collecting process is killed during rollouts of several turns; its finished calls are not sent to the engine again."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from roundhouse.activity import ACTIVITY, Interrupted, Stalled, supervised
from roundhouse.collection import collector
from roundhouse.collection.in_process_runner import InProcessRunner
from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError, StoreError
from roundhouse.rollout.replay import JOURNAL
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest, read_part
from roundhouse.store.verification import find_garbage, verify
from roundhouse.trajectories.records import derive_seed
from tests import fork_server
from tests.gym.playground import ScriptedPolicy, calls, says, turns_of, written
from tests.stages.scripted_engine import ScriptedAnswer, ScriptedEngine

search = pytest.importorskip("roundhouse.plugins.example_environments.search")
pytestmark = pytest.mark.real

TASKS, GROUP, CALLS = 2, 4, 6


def guesses(messages: list[dict[str, Any]], seed: int) -> Any:
    """Guess by the seed, then report it."""
    return says("Done.") if turns_of(messages) == CALLS - 1 else calls(("guess", {"number": seed % 7 + 1}))


class GuessingEngine(ScriptedEngine):
    """Answers by conversation and seed. After `healthy` answers it is silent until `go_on`, or where `broken`, out of order.
    To calls with a seed in `silent` it is silent, too."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = GuessedAnswer
        self.policy = ScriptedPolicy(guesses)
        self.answered: list[int] = []
        self.broken = False
        self.silent: Container[int] = ()
        self.unanswered: set[int] = set()
        self.go_on = threading.Event()
        self.counting = threading.Lock()


class GuessedAnswer(ScriptedAnswer):
    server: GuessingEngine

    def do_POST(self) -> None:
        engine = self.server
        request = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with engine.counting:
            serves = len(engine.answered) < engine.healthy and request["seed"] not in engine.silent
            if serves:
                engine.answered.append(request["seed"])
            else:
                engine.unanswered.add(request["seed"])
        if not serves:
            if not engine.broken:
                engine.go_on.wait(60)
            return self.send(500, {"detail": "out of order"})
        made = engine.policy._answer(request["messages"], request["seed"])
        message = made.message | {
            "prompt_token_ids": made.prompt_token_ids,
            "generation_token_ids": made.generation_token_ids,
            "generation_log_probs": made.generation_log_probs,
        }
        choice = {"message": message, "finish_reason": made.finish_reason}
        return self.send(200, {"choices": [choice], "policy_version": 0})


@pytest.fixture
def engine() -> Iterator[GuessingEngine]:
    with GuessingEngine().serving() as server:
        yield server
        server.go_on.set()


def settings(store: str, **environment: Any) -> dict[str, Any]:
    rollout = {
        "prompts_per_iteration": TASKS,
        "group_size": GROUP,
        "concurrency": 3,
        "max_turns": 8,
        "max_tokens": 100_000,
    }
    rollout |= {"retry": {"attempts": 1, "first_delay_seconds": 0.01}}
    environment = {"kind": "guess_number", "guesses": 9} | environment
    return {"run_id": "r", "store": store, "rollout": rollout, "environment": environment}


def begun(store: str, **environment: Any) -> tuple[Run, Reference]:
    run = open_run(parse_config(settings(store, **environment)))
    return run, run.begin(run.stage(1, "refit"), policy_version=0).commit()


COLLECTING = """
import json, sys
from roundhouse.config.loading import parse_config
from roundhouse.collection import collector
from roundhouse.collection.in_process_runner import InProcessRunner
from roundhouse.stages.collect import collect_iteration
from roundhouse.store.run import open_run
collector.FLUSH_SECONDS = 0.05
run = open_run(parse_config(json.loads(sys.argv[1])))
collect_iteration(run, 1, run.stage(1, "refit").reference(), sys.argv[2])
"""


def kill_amid(engine: GuessingEngine, store: str, after: int) -> None:
    """Collect in a separate process; kill it after `after` answers of the engine are stored."""
    engine.healthy = after
    process = fork_server.start(
        [sys.executable, "-c", COLLECTING, json.dumps(settings(store)), engine.url], env=os.environ
    )
    try:
        stage, deadline = open_run(parse_config(settings(store))).stage(1, "collect"), time.monotonic() + 120
        while len(recorded_seeds(stage.location)) < after:
            assert time.monotonic() < deadline, "not written down in time"
            assert process.poll() is None, "the process ended by itself"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    engine.healthy = 10**6


def recorded_seeds(location: Location) -> set[int]:
    """Seeds of all model calls that the store knows of, in finished rollouts or in the journal."""
    found: set[int] = set()
    for name in location.names():
        table = None
        if name.startswith("journal-"):
            table = read_part(location, name, JOURNAL)
            rows = [] if table is None else [row for row in table.to_pylist() if row["event"] == "call"]
            found |= {derive_seed(row["seed"], row["number"]) for row in rows}
        if name.startswith("rollouts-"):
            table = read_part(location, name, collector.ROLLOUTS)
            rows = [] if table is None else table.to_pylist()
            found |= {derive_seed(row["seed"], number) for row in rows for number in range(row["turns"])}
    return found


def dataset(reference: Reference) -> list[Any]:
    """All rows without their clocks; rollouts stand in the order in which they finished, which is a clock too."""
    return [written(rollout) for rollout in sorted(read_rollouts(reference), key=lambda each: each.rollout_id)]


@pytest.mark.parametrize("after", [7, 31])
def test_a_killed_collection_asks_the_engine_for_no_finished_turn_again_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, engine: GuessingEngine, after: int
) -> None:
    run, weights = begun(f"{tmp_path}/alone")
    alone = collect_iteration(run, 1, weights, engine.url)
    everything = set(engine.answered)
    assert len(engine.answered) == len(everything) == TASKS * GROUP * CALLS
    assert not [name for name in Location(alone.uri).names() if name.startswith("journal-")]

    engine.answered.clear()
    run, weights = begun(f"{tmp_path}/killed")
    kill_amid(engine, f"{tmp_path}/killed", after)
    stage = run.stage(1, "collect")
    recorded = recorded_seeds(stage.location)
    assert len(recorded) == after
    assert find_garbage(f"{tmp_path}/killed") == [], "an unfinished stage is no garbage"
    engine.answered.clear()
    resumed = collect_iteration(run, 1, weights, engine.url)
    assert set(engine.answered).isdisjoint(recorded)
    assert set(engine.answered) | recorded == everything
    assert len(engine.answered) == len(everything) - after
    assert dataset(resumed) == dataset(alone)

    manifest = read_manifest(resumed)
    told = manifest.details["resumptions"]
    assert 1 <= told["rollouts_resumed"] <= 3, "as many as were in flight"
    assert told["turns_resumed"] == manifest.metrics["rollout/turns_resumed"] > 0
    assert told["rollouts_restarted"] == {}
    assert all(meaning_of(name) for name in manifest.metrics), "each of its numbers is on the page of metrics"
    assert not [name for name in stage.location.names() if name.startswith("journal-")]
    assert verify(f"{tmp_path}/killed").problems == []


def interrupt(run: Run, weights: Reference, engine: GuessingEngine, after: int) -> None:
    """Let the engine break for good after so many answers, which fails the stage."""
    engine.healthy, engine.broken = after, True
    with pytest.raises(InfraError, match="out of order"):
        collect_iteration(run, 1, weights, engine.url)
    engine.healthy, engine.broken = 10**6, False


def test_turns_of_rollouts_that_a_dead_engine_failed_survive_in_any_store(
    store_uri: str, engine: GuessingEngine
) -> None:
    run, weights = begun(store_uri)
    interrupt(run, weights, engine, 10)
    reference = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.answered) == len(set(engine.answered)) == TASKS * GROUP * CALLS
    assert reference.counts["completed"] == TASKS * GROUP
    assert read_manifest(reference).details["resumptions"]["turns_resumed"] >= 4


def test_an_interruption_after_an_interruption_is_counted_with_it(tmp_path: Path, engine: GuessingEngine) -> None:
    run, weights = begun(str(tmp_path))
    interrupt(run, weights, engine, 10)
    interrupt(run, weights, engine, 17)
    reference = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.answered) == len(set(engine.answered)) == TASKS * GROUP * CALLS
    assert read_manifest(reference).attempt == 3
    assert read_manifest(reference).details["resumptions"]["rollouts_resumed"] >= 3


def test_a_damaged_journal_costs_its_turns_and_the_manifest_says_so(tmp_path: Path, engine: GuessingEngine) -> None:
    run, weights = begun(str(tmp_path))
    interrupt(run, weights, engine, 8)
    interrupt(run, weights, engine, 11)
    location = run.stage(1, "collect").location
    first = next(name for name in location.names() if name.startswith("journal-"))
    location.write(first, location.read(first)[:-20])
    reference = collect_iteration(run, 1, weights, engine.url)
    assert reference.counts["completed"] == TASKS * GROUP
    assert set(read_manifest(reference).details["resumptions"]["rollouts_restarted"]) == {"incomplete_journal"}
    assert read_manifest(reference).metrics["rollout/restarted"] >= 1


def test_a_journal_that_outlives_its_stage_is_garbage_and_no_problem(
    tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = begun(str(tmp_path))
    interrupt(run, weights, engine, 10)

    def refuses(self: Location, name: str) -> None:
        raise StoreError("the store is away")

    with monkeypatch.context() as away:
        away.setattr(Location, "delete", refuses)
        reference = collect_iteration(run, 1, weights, engine.url)
    left = {name for name in Location(reference.uri).names() if name.startswith("journal-")}
    assert left
    garbage = {item.name.rsplit("/", 1)[-1] for item in find_garbage(str(tmp_path))}
    assert left <= garbage
    assert verify(str(tmp_path)).problems == []


def test_a_full_disk_ends_the_collection_while_it_runs(
    tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock that writes parts works in the background; its failure must not stay there."""
    run, weights = begun(str(tmp_path))
    engine.healthy = 5  # the others wait for an answer for a minute
    monkeypatch.setattr(collector, "FLUSH_SECONDS", 0.05)

    def full(calls: Any) -> bytes:
        raise StoreError("the disk is full")

    monkeypatch.setattr(collector, "journal_parquet", full)
    begun_at = time.monotonic()
    with pytest.raises(StoreError, match="the disk is full"):
        collect_iteration(run, 1, weights, engine.url)
    assert time.monotonic() - begun_at < 30


def test_a_rollout_that_holds_the_thread_of_all_others_is_given_up_with_them_and_the_next_attempt_makes_all(
    tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = begun(str(tmp_path))
    ended_by: list[type[BaseException]] = []

    async def hold(*_: Any) -> None:
        try:
            while True:
                time.sleep(0.01)  # noqa: ASYNC251 - it holds the thread of the loop
        except BaseException as error:
            ended_by.append(type(error))
            raise

    with monkeypatch.context() as planted:
        planted.setattr(search.GuessNumber, "verify", hold)
        while not ended_by:  # a slow machine is given up before a rollout has come so far, and the next attempt goes on
            with pytest.raises(Stalled, match="nothing has moved"):
                supervised(lambda: collect_iteration(run, 1, weights, engine.url), "collect", "iteration 1", 1)
    assert ended_by[0] is Interrupted
    assert ACTIVITY.wait_quiescent(10), f"left behind: {ACTIVITY.summary()}"
    reference = collect_iteration(run, 1, weights, engine.url)
    assert reference.counts["completed"] == TASKS * GROUP


def test_a_stage_that_is_given_up_while_its_runner_starts_leaves_no_runner(
    tmp_path: Path, engine: GuessingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = begun(str(tmp_path))
    start = InProcessRunner.start

    def slow(runner: InProcessRunner) -> None:
        start(runner)
        runners.append(runner)
        while True:
            time.sleep(0.01)

    runners: list[InProcessRunner] = []
    monkeypatch.setattr(InProcessRunner, "start", slow)
    while not runners:  # a slow machine is given up before it comes so far
        with pytest.raises(Stalled, match="nothing has moved"):
            supervised(lambda: collect_iteration(run, 1, weights, engine.url), "collect", "iteration 1", 1)
    assert runners[0].ended.wait(10)
    assert ACTIVITY.wait_quiescent(10), f"left behind: {ACTIVITY.summary()}"
