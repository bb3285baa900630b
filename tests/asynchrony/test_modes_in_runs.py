"""Each mode in real overlapped runs on one Prefect server: the resulting stores.

`fully-async` uses a bucket and a curriculum, and is killed in the overlap and restarted. `finish` is killed after the last
rollout of a stage, `windowed` after the decision on a step, before its groups are collected. In another run all rollouts of
an iteration fail, and `failures.on_too_few` skips it.
"""

from __future__ import annotations

import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import ControllerJournal
from roundhouse.collection.asynchronous.plan import Plan, bound_of
from roundhouse.collection.controller import Block, Controller
from roundhouse.collection.runner import ENGINE
from roundhouse.config.loading import parse_config
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.run import Run, open_run, skip_of
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import Rollout, Status
from tests.asynchrony.place import ITERATIONS, SECONDS, TASKS, Place
from tests.asynchrony.world import check
from tests.chaos.strikes import Strike

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MODES: dict[str, dict[str, Any]] = {
    "fully-async": {"mode": "fully-async", "staleness": 2},
    "finish": {"mode": "batch-async", "staleness": 1, "refit": "drain"},
    "windowed": {"mode": "windowed", "staleness": 3, "window": 4},
}
STRIKES = {
    "fully-async": Strike("flow", "create iterations/000002/train/manifest.json", "before"),
    "finish": Strike("flow", "create iterations/000002/collect/manifest.json", "before"),
    "windowed": Strike("flow", "create iterations/000002/collect/manifest.json", "before"),
}
SKIPPED = 3
SLOW = 1
"""Position of a group, in the windowed run, that takes until version 1 is there."""


@pytest.fixture(scope="module")
def bucket(s3_server: str) -> Iterator[str]:
    """A store on an S3 server."""
    import s3fs

    name = f"rh-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=name)
    yield f"s3://{name}/store"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def runs(place: Place, bucket: str) -> Iterator[dict[str, Run]]:
    """Finished runs of all modes, and one that skips. Each has a separate engine, because its versions differ."""
    keys: dict[str, dict[str, Any]] = {name: {"asynchrony": mode} for name, mode in MODES.items()}
    keys["fully-async"]["store"] = bucket
    banded = {"curriculum": {"kind": "success_band", "window": 2}}
    keys["fully-async"]["rollout"] = place.settings("fully-async")["rollout"] | banded
    keys["windowed"] |= waiting(place)
    keys["skips"] = skipping(place)
    engines = {name: place.start_engine(f"engine-{name}", 0.3) for name in keys}
    for name, engine in engines.items():
        keys[name]["generation"] = place.settings(name)["generation"] | {"engine_url": engine.url}
    try:
        started = {name: place.train(name, STRIKES.get(name), **keys[name]) for name in keys}
        for name in STRIKES:
            assert started[name].wait(SECONDS) == -signal.SIGKILL, place.log(name).read_text()
            started[name] = place.train(name, **keys[name])
        for name, process in started.items():
            assert process.wait(SECONDS) == 0, place.log(name).read_text()
        yield {name: place.run(name, keys[name].get("store")) for name in keys}
    finally:
        for engine in engines.values():
            engine.stop()


def planned(place: Place, name: str) -> Run:
    """A run of these settings that is only planned."""
    return open_run(parse_config(place.settings(name) | {"store": str(place.directory / "planned")}))


def skipping(place: Place) -> dict[str, Any]:
    """A run that can make nothing of iteration `SKIPPED`."""
    plan = Plan(planned(place, "skips"))
    refused = sorted({spec.row["task_id"] for spec in plan.specs(SKIPPED)})
    return {
        "environment": {
            "kind": "custom",
            "target": "tests.asynchrony.refusing:Refusing",
            "parameters": {"refused": refused},
        },
        "failures": {"on_too_few": "skip"},
    }


def waiting(place: Place) -> dict[str, Any]:
    """A run in which a group of iteration 1 takes until version 1 is there."""
    slow = Plan(planned(place, "windowed")).spec((SLOW, 0)).row["task_id"]
    version_1 = place.directory / "store/runs/windowed/checkpoints/000001/manifest.json"
    return {
        "environment": {
            "kind": "custom",
            "target": "tests.asynchrony.waiting:Waiting",
            "parameters": {"task": slow, "file": str(version_1)},
        },
        "rollout": place.settings("windowed")["rollout"] | {"concurrency": 4},
    }


@pytest.fixture(params=MODES)
def run(runs: dict[str, Run], request: pytest.FixtureRequest) -> Run:
    return runs[request.param]


def collected(run: Run) -> dict[int, list[Rollout]]:
    return {k: read_rollouts(run.stage(k, "collect").reference()) for k in range(1, ITERATIONS + 1)}


def test_every_rollout_of_the_plan_is_made_once_and_trained_on_once(run: Run) -> None:
    plan, trained = Plan(run), {}
    assert run.latest_checkpoint().policy_version == ITERATIONS
    made = [(r.rollout_id, r.seed) for rollouts in collected(run).values() for r in rollouts]
    assert Counter(made) == Counter(
        (spec.rollout_id, spec.seed) for k in range(1, ITERATIONS + 1) for spec in plan.specs(k)
    )
    for k, rollouts in collected(run).items():
        assert len({r.group_id for r in rollouts}) == run.config.rollout.prompts_per_iteration
        if run.config.asynchrony.window == 1:
            assert {r.rollout_id for r in rollouts} == {spec.rollout_id for spec in plan.specs(k)}
        validated = run.stage(k, "validate").reference()
        counted = Counter(read_table(validated, "sequences").column("rollout_id").to_pylist())
        refused = read_table(validated, "quarantine").select(["rollout_id", "reason", "evidence"]).to_pylist()
        usable = Counter(r.rollout_id for r in rollouts if r.status in (Status.COMPLETED, Status.TRUNCATED))
        assert counted == usable, refused
        trained[k] = read_manifest(run.stage(k, "train").reference()).inputs["sequences"]
    assert trained == {k: run.stage(k, "validate").reference() for k in range(1, ITERATIONS + 1)}
    assert verify(run.location.uri.split("/runs/")[0]).problems == []


def test_no_token_is_older_than_the_bound(run: Run) -> None:
    ages: Counter[int] = Counter()
    for k, rollouts in collected(run).items():
        for turn in (turn for rollout in rollouts for turn in rollout.turns):
            versions = [span["version"] for span in turn.version_spans or ()] or [turn.policy_version]
            assert min(versions) == turn.policy_version
            ages.update(k - 1 - version for version in versions)
        assert read_manifest(run.stage(k, "train").reference()).metrics["staleness/age_max"] <= (
            run.config.asynchrony.staleness
        )
    assert min(ages) >= 0
    assert 1 <= max(ages) <= run.config.asynchrony.staleness, "it ran ahead, and no further than it may"


def test_every_state_that_the_controller_went_through_is_sound(run: Run) -> None:
    """The journal of the real run, event for event, under the checks of the exploration."""
    controller = Controller(bound_of(run))
    for event in ControllerJournal(run.location / "asynchrony").events():
        if isinstance(event, happened.TransferStarted) and controller.terms.drains:
            assert not controller.replicas[ENGINE].running, "weights wait until running rollouts have ended"
        controller.apply(event)
        check(controller)
    assert controller.version == ITERATIONS


def test_with_refit_finish_a_rollout_has_one_version(runs: dict[str, Run]) -> None:
    for rollouts in collected(runs["finish"]).values():
        for rollout in rollouts:
            assert len({turn.policy_version for turn in rollout.turns}) == 1
            assert not any(len(turn.version_spans or ()) > 1 for turn in rollout.turns)


def test_fully_async_holds_no_rollout_back_for_weights_that_are_on_their_way(runs: dict[str, Run]) -> None:
    """While weights are exchanged a slot is filled, or everything within the bound has begun."""
    controller = Controller(bound_of(runs["fully-async"]))
    transfers = 0
    for event in ControllerJournal(runs["fully-async"].location / "asynchrony").events():
        controller.apply(event)
        if (
            ENGINE in controller.replicas
            and controller.replicas[ENGINE].incoming
            and controller.replicas[ENGINE].version
        ):
            transfers += 1
            answer = controller.admission(ENGINE)
            assert not (isinstance(answer, Block) and answer.for_weights)
    assert transfers


def test_killed_anywhere_both_lanes_went_on(run: Run) -> None:
    events = list(ControllerJournal(run.location / "asynchrony").events())
    [_, killed] = [place for place, event in enumerate(events) if isinstance(event, happened.Restarted)]

    def iterations(kind: type, some: list[Any]) -> list[int]:
        return [event.iteration for event in some if isinstance(event, kind)]

    interrupted = set(iterations(happened.TrainingStarted, events[:killed]))
    interrupted -= set(iterations(happened.TrainingFinished, events[:killed]))
    if run.run_id == "finish":
        assert interrupted <= {1}, "step 2 had not begun; step 1 may have been at work, and may have ended"
    else:
        assert interrupted == {2}
    started = Counter(iterations(happened.TrainingStarted, events))
    assert started == {k: 1 + (k in interrupted) for k in range(1, ITERATIONS + 1)}
    assert iterations(happened.TrainingFinished, events) == list(range(1, ITERATIONS + 1))


def test_with_a_window_a_step_does_not_wait_for_a_slow_group_and_trains_on_another(runs: dict[str, Run]) -> None:
    run = runs["windowed"]
    trained = {
        k: read_manifest(run.stage(k, "collect").reference()).details["groups"] for k in range(1, ITERATIONS + 1)
    }
    assert sorted(position for groups in trained.values() for position in groups) == list(range(TASKS * ITERATIONS))
    assert trained[1] == [0, 2, 3], f"{SLOW} ends when version 1 is there"
    assert SLOW in trained[2], "it cannot be passed over again"


def test_what_a_window_has_generated_is_kept_whole_and_under_its_iteration(runs: dict[str, Run]) -> None:
    run = runs["windowed"]
    plan, trained = Plan(run), {r.rollout_id: r for rollouts in collected(run).values() for r in rollouts}
    for k in range(1, ITERATIONS + 1):
        generated = {r.rollout_id: r for r in read_rollouts(run.stage(k, "generate").reference())}
        assert generated == {spec.rollout_id: trained[spec.rollout_id] for spec in plan.specs(k)}


def test_a_skipped_iteration_takes_its_groups_along_and_the_next_ones_go_on(runs: dict[str, Run]) -> None:
    run = runs["skips"]
    plan = Plan(run)
    skips = {k: skip.code for k in range(1, ITERATIONS + 1) if (skip := skip_of(run, k)) is not None}
    assert skips == {SKIPPED: "failing_rollouts"}
    assert run.stage(SKIPPED, "collect").reference() is None
    weights = [read_manifest(run.checkpoint(k).reference()).model_files.named() for k in (SKIPPED - 1, SKIPPED)]
    assert weights[0] == weights[1]
    for k in {1, 2, 4}:
        sequences = read_table(run.stage(k, "validate").reference(), "sequences")
        assert set(sequences.column("rollout_id").to_pylist()) == {spec.rollout_id for spec in plan.specs(k)}
    events = list(ControllerJournal(run.location / "asynchrony").events())
    assert [event.iteration for event in events if isinstance(event, happened.IterationSkipped)] == [SKIPPED]
    assert [event.iteration for event in events if isinstance(event, happened.TrainingFinished)] == [1, 2, 4]
