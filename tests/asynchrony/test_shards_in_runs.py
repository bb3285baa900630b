"""A real overlapped run with shards: real flows, Prefect server, store, trainer and workers; the engine only takes time.

The run is killed shortly before the commit of step 1 and restarted. `test_rolling_shards.py` tests run-ahead, ages and lost
workers without depending on a clock.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import ControllerJournal
from roundhouse.collection.asynchronous.plan import Plan, bound_of
from roundhouse.collection.controller import Controller
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import Status
from tests.asynchrony.place import SECONDS, SIZE, STALENESS, TASKS, Place
from tests.asynchrony.world import check
from tests.chaos.strikes import Strike

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ITERATIONS, SHARDS = 2, 2
IN_STEP_1 = Strike("flow", "create iterations/000001/train/manifest.json", "before")


@pytest.fixture(scope="module")
def run(place: Place) -> Iterator[Run]:
    """The run, finished after the kill."""
    engine = place.start_engine("engine-shards", 0.3)
    rollout = {"prompts_per_iteration": TASKS, "group_size": SIZE, "concurrency": 2 * SHARDS}
    keys = {
        "iterations": ITERATIONS,
        "evaluation": {"every": 0},
        "generation": place.settings("shards")["generation"] | {"engine_url": engine.url},
        "rollout": rollout | {"distribution": {"kind": "process", "shards": SHARDS}},
    }
    try:
        process = place.train("shards", IN_STEP_1, **keys)
        assert process.wait(SECONDS) == -signal.SIGKILL, place.log("shards").read_text()
        assert place.run("shards").stage(1, "train").reference() is None
        assert place.train("shards", **keys).wait(SECONDS) == 0, place.log("shards").read_text()
        yield place.run("shards")
    finally:
        engine.stop()


def test_every_rollout_is_made_once_and_trained_on_once_by_its_own_iteration(run: Run) -> None:
    plan = Plan(run)
    assert run.latest_checkpoint().policy_version == ITERATIONS
    for k in range(1, ITERATIONS + 1):
        reference = run.stage(k, "collect").reference()
        rollouts = read_rollouts(reference)
        assert len(rollouts) == TASKS * SIZE == reference.counts["requested"]
        assert {r.rollout_id: r.seed for r in rollouts} == {spec.rollout_id: spec.seed for spec in plan.specs(k)}
        finished = Counter(r.rollout_id for r in rollouts if r.status in (Status.COMPLETED, Status.TRUNCATED))
        sequences = read_table(run.stage(k, "validate").reference(), "sequences")
        assert Counter(sequences.column("rollout_id").to_pylist()) == finished
    assert verify(run.location.uri.split("/runs/")[0]).problems == []


def test_no_token_is_older_than_the_bound_and_the_manifest_tells_the_ages(run: Run) -> None:
    ages: Counter[int] = Counter()
    for k in range(1, ITERATIONS + 1):
        reference = run.stage(k, "collect").reference()
        rollouts = read_rollouts(reference)
        ages.update(k - 1 - turn.policy_version for rollout in rollouts for turn in rollout.turns)
        oldest = Counter(str(k - 1 - min(turn.policy_version for turn in r.turns)) for r in rollouts if r.turns)
        manifest = read_manifest(reference)
        assert manifest.details["rollouts_by_age"] == oldest
        versions = {turn.policy_version for rollout in rollouts for turn in rollout.turns}
        assert manifest.inputs.keys() == {f"weights_{version}" for version in versions}
        trained = read_manifest(run.stage(k, "train").reference())
        assert trained.metrics["staleness/age_max"] <= STALENESS
    assert set(ages) <= {0, STALENESS}


def test_every_state_that_the_controller_went_through_is_sound(run: Run) -> None:
    controller = Controller(bound_of(run))
    events = list(ControllerJournal(run.location / "asynchrony").events())
    for event in events:
        controller.apply(event)
        check(controller)
    assert controller.version == ITERATIONS
    assert sum(isinstance(event, happened.Restarted) for event in events) == 2
    finished = [event.iteration for event in events if isinstance(event, happened.TrainingFinished)]
    assert finished == list(range(1, ITERATIONS + 1))


def test_each_shard_is_told_in_the_manifest_its_cpu_seconds_are_charged_and_no_worker_is_left(run: Run) -> None:
    manifests = [read_manifest(run.stage(k, "collect").reference()) for k in range(1, ITERATIONS + 1)]
    for manifest in manifests:
        told = manifest.details["distribution"]
        assert told["kind"] == "process"
        assert [shard["shard"] for shard in told["shards"]] == ["s0001of0002", "s0002of0002"]
        fresh = [shard["cpu_seconds"] for shard in told["shards"] if shard["attempt"] == manifest.attempt]
        assert sum(fresh) <= manifest.resources["cpu_seconds"] < sum(fresh) + 60
    store = run.location.uri
    left = [p for p in psutil.process_iter(["cmdline"]) if any(store in word for word in p.info["cmdline"] or ())]
    assert left == []
