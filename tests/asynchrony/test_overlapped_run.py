"""A real run that collects while it trains: real flows, Prefect server, store and trainer; the engine only takes time.

It is killed in the overlap, while step 2 is about to be committed and rollouts of iteration 3 are under way, and started again.
"""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import ControllerJournal
from roundhouse.collection.asynchronous.plan import Plan
from roundhouse.errors import EXIT_CODES, InfraError
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import Status
from tests.asynchrony.place import ITERATIONS, SECONDS, SIZE, STALENESS, TASKS, Place
from tests.chaos.strikes import Strike
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

WINDOW = 2
"""Of its curriculum."""


@pytest.fixture(scope="module")
def killed_and_resumed(place: Place) -> Run:
    """The run, finished after a kill in the overlap."""
    strike = Strike("flow", "create iterations/000002/train/manifest.json", "before")
    rollout = place.settings("run")["rollout"] | {"curriculum": {"kind": "success_band", "window": WINDOW}}
    assert place.train("run", strike, rollout=rollout).wait(SECONDS) == -signal.SIGKILL, place.log("run").read_text()
    run = place.run("run")
    assert run.stage(2, "train").reference() is None
    assert run.stage(3, "collect").location.exists("attempt-0001.json"), "collect 3 was under way beside step 2"
    assert place.train("run", rollout=rollout).wait(SECONDS) == 0, place.log("run").read_text()
    return run


def test_after_a_kill_in_the_overlap_every_rollout_is_trained_on_once_by_its_own_iteration(
    killed_and_resumed: Run,
) -> None:
    run, plan = killed_and_resumed, Plan(killed_and_resumed)
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


def test_a_curriculum_draws_by_what_the_oldest_policy_that_may_roll_out_was_trained_on(killed_and_resumed: Run) -> None:
    """And by nothing that was made while the loops overlapped: the plan above is made again from the finished run."""
    for k in range(1, ITERATIONS + 1):
        manifest = read_manifest(killed_and_resumed.stage(k, "collect").reference())
        counted = {reference.iteration for name, reference in manifest.inputs.items() if name.startswith("drawn_by_")}
        last = k - 1 - STALENESS
        assert counted == set(range(max(1, last - WINDOW + 1), last + 1))
        assert 0 <= manifest.metrics["curriculum/unseen"] <= 1


def test_no_token_is_older_than_the_bound_and_some_are_as_old(killed_and_resumed: Run) -> None:
    ages = Counter()
    for k in range(1, ITERATIONS + 1):
        reference = killed_and_resumed.stage(k, "collect").reference()
        ages += Counter(k - 1 - turn.policy_version for r in read_rollouts(reference) for turn in r.turns)
        manifest = read_manifest(killed_and_resumed.stage(k, "train").reference())
        assert manifest.metrics["staleness/age_max"] <= STALENESS
    assert set(ages) == {0, STALENESS}


def test_the_journal_tells_of_both_starts_and_of_each_step_once(killed_and_resumed: Run) -> None:
    events = list(ControllerJournal(killed_and_resumed.location / "asynchrony").events())
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
        rollout = {"prompts_per_iteration": TASKS, "group_size": SIZE, "concurrency": 2, "retry": {"attempts": 1}}
        process = place.train("dies", generation=generation, rollout=rollout)
        until(lambda: (place.directory / "store/runs/dies/checkpoints/000001/manifest.json").exists(), process=process)
        engine.stop()
        assert process.wait(SECONDS) == EXIT_CODES[InfraError]
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
                for entry in read_manifest(run.checkpoint(k).reference()).model_files.named()
                if entry.path.endswith(".safetensors")
            }
            for run in (plain, bounded)
        ]
        assert weights[0] == weights[1]
        assert weights[0]


def _task_runs(place: Place, run_id: str) -> dict[str, tuple[str, str]]:
    """Begin and end of the run's task runs, by name, as Prefect has them."""
    return {task["name"]: (task["start_time"], task["end_time"]) for task in place.task_runs(run_id, "COMPLETED")}
