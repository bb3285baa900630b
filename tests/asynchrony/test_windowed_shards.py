"""With a window, a step trains on whole groups of whatever shards are there; real workers' code, store and controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.overlap import StepBatch
from roundhouse.collection.asynchronous.plan import Plan
from roundhouse.collection.collector import written_rollouts
from roundhouse.config.loading import parse_config
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.prefetch import collect_chosen
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import derive_seed
from tests.asynchrony.test_rolling_shards import (
    TASKS,
    Collecting,
    Lane,
    Threads,
    VersionedEngine,
    check_journal,
    settings,
)
from tests.asynchrony.test_rolling_shards import engine as engine
from tests.asynchrony.test_rolling_shards import threads as threads
from tests.stages.test_interrupted_collect import CALLS, GROUP
from tests.waiting import until

pytestmark = pytest.mark.real

SLOW = (1, "s0002of0002")
"""Groups 2 and 3."""


def windowed(store: Path) -> Run:
    """A group can be passed over twice, and begins one version early."""
    return open_run(parse_config(settings(str(store), mode="windowed", staleness=3, window=6)))


def step(lane: Lane, k: int) -> Reference:
    """Train on the groups that the controller chooses."""
    until(lambda: lane.controller.training() is not None)
    groups = lane.controller.training().groups
    lane.dispatch.tell(happened.TrainingStarted(k, groups))
    return finish(lane, k, groups)


def finish(lane: Lane, k: int, groups: tuple[int, ...]) -> Reference:
    made = {rollout.rollout_id for rollout in lane.runner.outlines(groups)}
    assert made == ids(lane, groups), "whether too many failed is judged by these"
    batch = StepBatch(groups, lane.runner.at_hand(groups), lane.runner.window_seconds(groups))
    lane.runner.flush()
    reference = collect_chosen(lane.run, k, lane.runner, batch)
    lane.trained(k)
    lane.transfer(k)
    return reference


def ids(lane: Lane, groups: tuple[int, ...]) -> set[str]:
    return {lane.plan.spec(key).rollout_id for position in groups for key in lane.plan.samples(position)}


def details(reference: Reference) -> dict[str, Any]:
    return read_manifest(reference).details


def shards(reference: Reference) -> list[str]:
    return [shard["shard"] for shard in details(reference)["distribution"]["shards"]]


def test_a_step_passes_over_a_slow_shard_and_a_run_that_goes_on_trains_on_each_group_once(
    tmp_path: Path, engine: VersionedEngine, threads: Threads
) -> None:
    run = windowed(tmp_path)
    failing = Plan(run).spec((4, 0))
    engine.silent, engine.broken = {derive_seed(failing.seed, number) for number in range(CALLS)}, True
    threads.held = {SLOW}
    lane = Lane(run, engine)
    lane.transfer(0)
    ahead = [Collecting(lane, k) for k in (1, 2)]
    first = step(lane, 1)
    assert details(first)["groups"] == [0, 1, 4, 5], "the shard with 2 and 3 is passed over"
    assert read_manifest(first).metrics["time/rollouts"] > 0
    assert first.counts["failed"] == 1
    until(lambda: 7 in lane.controller.pool.complete)
    assert ahead[0].found == ahead[1].found == [], "a step is yet to be decided on for some of their groups"
    lane.runner.stop()
    assert all(stage.was_ended() for stage in ahead)

    threads.held, threads.began = set(), []
    engine.silent = ()
    lane = Lane(run, engine)
    lane.transfer(1)
    stages = {k: Collecting(lane, k) for k in (1, 2, 3)}
    collected = {1: first} | {k: step(lane, k) for k in (2, 3)}
    assert [details(collected[k])["groups"] for k in (2, 3)] == [[2, 3, 6, 7], [8, 9, 10, 11]]
    generated = {k: stage.result() for k, stage in stages.items()}
    lane.runner.stop()
    begun = {(k, label) for k, label, *_ in threads.began}
    assert begun.isdisjoint({(1, "s0001of0002"), (2, "s0001of0002")}), (
        "their groups are settled, failed rollouts or not"
    )
    trained = {r.rollout_id: r for reference in collected.values() for r in read_rollouts(reference)}
    for k, reference in generated.items():
        held = {r.rollout_id: r for r in read_rollouts(reference)}
        assert held == {spec.rollout_id: trained[spec.rollout_id] for spec in lane.plan.specs(k)}
        assert shards(reference) == ["s0001of0002", "s0002of0002"]
    assert len(trained) == 3 * TASKS * GROUP
    assert len(engine.answered) == len(set(engine.answered))
    check_journal(run)
    assert verify(str(tmp_path)).problems == []


@pytest.mark.parametrize("unfinished", ["held", "unreported"])
def test_a_skipped_step_takes_the_oldest_groups_along_and_what_was_made_of_them_is_kept(
    tmp_path: Path, engine: VersionedEngine, threads: Threads, unfinished: str
) -> None:
    run = windowed(tmp_path)
    setattr(threads, unfinished, {SLOW})
    lane = Lane(run, engine)
    lane.transfer(0)
    first = Collecting(lane, 1)
    until(lambda: {0, 1} <= set(lane.controller.pool.complete))
    groups = (0, 1) if unfinished == "held" else (0, 1, 2, 3)
    place = run.stage(1, "generate").location
    until(lambda: {rollout.rollout_id for rollout in written_rollouts(place)} == ids(lane, groups))
    lane.dispatch.tell(happened.IterationSkipped(1, "too_few_rollouts"))
    reference = first.result()
    assert lane.at_work() == set()
    lane.runner.stop()
    assert {r.rollout_id for r in read_rollouts(reference)} == ids(lane, groups)
    assert shards(reference) == ["s0001of0002", "s0002of0002"][: len(groups) // 2]
    assert reference.counts["requested"] == reference.counts["completed"] == len(groups) * GROUP
    assert verify(str(tmp_path)).problems == []
