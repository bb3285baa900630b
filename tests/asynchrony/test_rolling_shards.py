"""The generation lane over shards: real workers, store and controller. The engine answers by the seed with the version set by
the test; the test controls training."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection import sharded_attempt
from roundhouse.collection.asynchronous.controller_journal import PLACE, ControllerJournal, resume
from roundhouse.collection.asynchronous.plan import Plan, bound_of
from roundhouse.collection.controller import Controller
from roundhouse.collection.runner import ENGINE
from roundhouse.collection.shard_runner import ShardRunner
from roundhouse.collection.shard_worker import carry_out
from roundhouse.collection.sharded_attempt import ShardedAttempt
from roundhouse.collection.shards import ShardSpec
from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError
from roundhouse.launch.base import Launcher, Program, Stopped
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.prefetch import prefetch_rollouts
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest
from roundhouse.store.verification import verify
from roundhouse.training.service.job_entry import REPORT
from roundhouse.trajectories.records import derive_seed
from tests.asynchrony.world import check
from tests.stages.test_distributed import is_alive, workers
from tests.stages.test_interrupted_collect import CALLS, GROUP, GuessedAnswer, GuessingEngine, recorded_seeds
from tests.stages.test_interrupted_collect import settings as guessing
from tests.waiting import until

pytestmark = pytest.mark.real

TASKS, SHARDS, PATIENCE = 4, 2, 90.0


class VersionedAnswer(GuessedAnswer):
    server: VersionedEngine

    def send(self, status: int, body: dict[str, Any]) -> None:
        super().send(status, body | ({"policy_version": self.server.version} if status == 200 else {}))


class VersionedEngine(GuessingEngine):
    """Engine that reports the version set by the test."""

    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = VersionedAnswer


@pytest.fixture
def engine() -> Iterator[VersionedEngine]:
    with VersionedEngine().serving() as server:
        yield server
        server.go_on.set()


def settings(store: str, **asynchrony: Any) -> dict[str, Any]:
    tree = guessing(store) | {"generation": {"max_model_len": 100_000, "sampling": {"max_new_tokens": 1000}}}
    tree["rollout"] |= {
        "prompts_per_iteration": TASKS,
        "concurrency": 40,
        "distribution": {"kind": "process", "shards": SHARDS},
    }
    tree["rollout"] |= {"retry": {"attempts": 4, "first_delay_seconds": 0.01}}
    modes = {"mode": "batch-async", "staleness": 1} | asynchrony
    return tree | {"iterations": 3, "evaluation": {"every": 0}, "asynchrony": modes}


def publish(run: Run, version: int) -> None:
    run.point_to(run.begin(run.checkpoint(version), policy_version=version).commit())


class Lane:
    """One life of a generation lane; the test trains and transfers."""

    def __init__(self, run: Run, engine: VersionedEngine) -> None:
        self.run, self.plan, self.engine = run, Plan(run), engine
        if run.latest_checkpoint() is None:
            publish(run, 0)
        self.dispatch = resume(run, self.plan)
        self.runner = ShardRunner(run.config, self.plan, self.dispatch, engine.url)
        self.runner.start()

    @property
    def controller(self) -> Controller:
        return self.dispatch.controller

    def transfer(self, version: int) -> None:
        self.dispatch.tell(happened.TransferStarted(ENGINE, version))
        self.engine.version = version
        self.dispatch.tell(happened.TransferFinished(ENGINE, version))

    def train(self, k: int) -> None:
        self.dispatch.tell(happened.TrainingStarted(k, self.plan.groups(k)))
        self.runner.flush()
        self.trained(k)

    def trained(self, k: int) -> None:
        publish(self.run, k)
        self.dispatch.tell(happened.TrainingFinished(k))
        self.runner.flush()

    def at_work(self) -> set[tuple[int, str]]:
        with self.dispatch:
            return {(work.opened.iteration, work.shard.label) for work in self.runner._at_work}


class Collecting:
    """A collect stage under way in a thread."""

    def __init__(self, lane: Lane, iteration: int) -> None:
        self.found: list[Any] = []
        self.told: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._collect, args=(lane, iteration), daemon=True)
        self._thread.start()

    def _collect(self, lane: Lane, iteration: int) -> None:
        try:
            told = self.told
            progress: Callable[[int, int], None] = lambda *how_far: told.append(how_far)  # noqa: E731
            self.found.append(prefetch_rollouts(lane.run, iteration, lane.runner, progress))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.found.append(error)

    def result(self) -> Reference:
        self._thread.join(PATIENCE)
        [found] = self.found
        if isinstance(found, BaseException):
            raise found
        assert found is not None, "its lane has ended"
        return found

    def was_ended(self) -> bool:
        """Its lane ended before it was complete."""
        self._thread.join(PATIENCE)
        return self.found == [None]


def made(run: Run, k: int) -> dict[str, int]:
    """Seeds of the rollouts that a collect stage holds, by id."""
    reference = run.stage(k, "collect").reference()
    assert reference is not None
    rollouts = read_rollouts(reference)
    found = {rollout.rollout_id: rollout.seed for rollout in rollouts}
    assert len(found) == len(rollouts), "each once"
    return found


def check_journal(run: Run) -> list[happened.Event]:
    """Its events, under the checks of the exploration."""
    controller, events = Controller(bound_of(run)), list(ControllerJournal(run.location / PLACE).events())
    for event in events:
        controller.apply(event)
        check(controller)
    return events


# -- workers that are processes --------------------------------------------------------------------------------------


def test_a_lost_worker_is_admitted_again_on_newer_weights_a_stopped_lane_leaves_none_and_each_call_is_made_once(
    tmp_path: Path, engine: VersionedEngine
) -> None:
    run = open_run(parse_config(settings(str(tmp_path))))
    lane = Lane(run, engine)
    second = lane.plan.specs(2)[TASKS * GROUP // SHARDS :]
    engine.silent = {derive_seed(spec.seed, number) for spec in second for number in range(2, CALLS)}
    lane.transfer(0)
    first, ahead = Collecting(lane, 1), Collecting(lane, 2)
    manifest = read_manifest(first.result())
    assert manifest.counts["completed"] == TASKS * GROUP
    lane.train(1)
    place = run.stage(2, "collect").location
    until(lambda: any(name.endswith(f"/{REPORT}") for name in place.tree()))
    answered = {derive_seed(spec.seed, number) for spec in second for number in range(2)}
    until(lambda: answered <= recorded_seeds(place))
    until(lambda: lane.at_work() == {(2, "s0002of0002")})  # the other one has left its report, and ends

    lane.transfer(1)  # in flight: what runs goes on
    lost = workers()["s0002of0002"]
    os.kill(lost, signal.SIGKILL)
    until(lambda: workers().get("s0002of0002") not in (None, lost))
    with lane.dispatch:
        running = {lane.controller.pool.running[key].version for key in lane.controller.pool.running}
    assert running == {1}, "its rollouts were admitted again, on what the engine holds now"
    again = workers()["s0002of0002"]
    lane.runner.stop()
    assert not is_alive(again)
    assert ahead.was_ended()
    assert lane.at_work() == set()

    engine.silent, engine.version = (), 0
    engine.go_on.set()
    lane = Lane(run, engine)
    assert lane.controller.pool.complete_of == {2: TASKS // SHARDS}, "the whole shard's groups are there"
    lane.transfer(1)
    manifest = read_manifest(Collecting(lane, 2).result())
    lane.runner.stop()

    assert len(engine.answered) == len(set(engine.answered)) == 2 * TASKS * GROUP * CALLS, "each call once"
    for k in (1, 2):
        assert made(run, k) == {spec.rollout_id: spec.seed for spec in lane.plan.specs(k)}
    assert manifest.details["policy_versions"] == [0, 1]
    assert manifest.details["rollouts_by_age"] == {"1": TASKS * GROUP}
    assert [shard["attempt"] for shard in manifest.details["distribution"]["shards"]] == [1, 2]
    assert manifest.details["resumptions"]["turns_resumed"] > 0
    assert manifest.metrics["rollout/shards"] == SHARDS
    assert all(meaning_of(name) for name in manifest.metrics)
    assert manifest.inputs == {f"weights_{version}": run.checkpoint(version).reference() for version in (0, 1)}
    evicted = [event for event in check_journal(run) if isinstance(event, happened.RolloutEvicted)]
    reasons = Counter(event.reason for event in evicted)
    assert reasons["its worker was lost"] == len(second)
    left = {name for name in place.tree() if name.startswith(("writers", "journal"))}
    assert left == set()
    assert verify(str(tmp_path)).problems == []


# -- workers that are threads of the test, where no loss is planted ----------------------------------------------------


@dataclass
class Threads:
    """Workers as threads instead of processes."""

    losses: Counter[str] = field(default_factory=Counter)
    """How many workers of a shard are lost before they begin."""
    began: list[tuple[int, str, int | None, int]] = field(default_factory=list)
    """Iteration, shard, version and share of the concurrency."""
    held: set[tuple[int, str]] = field(default_factory=set)
    """Shards, by iteration and label, whose workers do nothing until they are told to end."""
    unreported: set[tuple[int, str]] = field(default_factory=set)
    """Those whose workers write all and leave no report until then."""

    def of(self, attempt: ShardedAttempt, programs: list[Program]) -> ThreadLauncher:
        return ThreadLauncher(self)


class ThreadLauncher(Launcher):
    ending_seconds = PATIENCE

    def __init__(self, threads: Threads) -> None:
        self.threads = threads

    def run(self, task: Program, said: Callable[[str], None], stopped: threading.Event) -> Location:
        spec = task.spec
        assert isinstance(spec, ShardSpec)
        self.threads.began.append((spec.iteration, task.label, spec.began_on, spec.config.rollout.concurrency))
        if self.threads.losses[task.label]:
            self.threads.losses[task.label] -= 1
            raise InfraError("its node is gone")
        which = spec.iteration, task.label
        if which not in self.threads.held:
            task.prepare()
            assert carry_out(f"{task.place.uri}/spec.json", said) == 0
        if which in self.threads.held | self.threads.unreported:
            task.place.delete(REPORT)
            assert stopped.wait(PATIENCE)
            raise Stopped
        return task.place


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    threads = Threads()
    monkeypatch.setattr(ShardedAttempt, "open_launcher", lambda attempt, programs: threads.of(attempt, programs))
    monkeypatch.setattr(sharded_attempt, "FIRST_PAUSE_SECONDS", 0.01)
    return threads


def test_shards_begin_in_the_plans_order_as_far_ahead_as_the_bound_allows(
    tmp_path: Path, engine: VersionedEngine, threads: Threads
) -> None:
    run = open_run(parse_config(settings(str(tmp_path))))
    lane = Lane(run, engine)
    lane.transfer(0)
    stages = [Collecting(lane, k) for k in (1, 2, 3)]
    stages[0].result()
    stages[1].result()
    assert stages[1].told[-1] == (TASKS * GROUP, TASKS * GROUP)
    assert not stages[2].found, "iteration 3 may not begin on version 0"
    lane.train(1)
    lane.transfer(1)
    stages[2].result()
    lane.runner.stop()
    assert sorted(threads.began) == [
        (k, f"s000{number}of0002", max(0, k - 2), 40 // SHARDS) for k in (1, 2, 3) for number in (1, 2)
    ]
    assert [k for k, *_ in threads.began] == sorted(k for k, *_ in threads.began)
    events = check_journal(run)
    assert sum(isinstance(event, happened.RolloutFinished) for event in events) == 3 * TASKS * GROUP


def test_a_shard_that_loses_too_many_workers_fails_its_stage_and_the_next_attempt_begins_it_again(
    tmp_path: Path, engine: VersionedEngine, threads: Threads
) -> None:
    tree = settings(str(tmp_path))
    tree["rollout"]["distribution"]["restarts"] = 1
    run = open_run(parse_config(tree))
    lane = Lane(run, engine)
    threads.losses["s0001of0002"] = 2
    lane.transfer(0)
    with pytest.raises(InfraError, match="its node is gone"):
        Collecting(lane, 1).result()
    assert lane.controller.pool.running == {}
    Collecting(lane, 1).result()
    lane.runner.stop()
    assert Counter(label for _, label, *_ in threads.began)["s0001of0002"] == 3
    assert len(engine.answered) == len(set(engine.answered)) == TASKS * GROUP * CALLS
    check_journal(run)


def test_a_shard_that_is_in_the_store_needs_no_worker_with_its_report_or_without(
    tmp_path: Path, engine: VersionedEngine, threads: Threads
) -> None:
    """The run was killed before its collect stage was committed, and then one report was lost."""
    run = open_run(parse_config(settings(str(tmp_path))))
    lane = Lane(run, engine)
    lane.transfer(0)
    opened = lane.runner.open(1, ShardedAttempt(run, run.stage(1, "collect"), 0, 0))
    assert lane.runner.wait(opened)
    lane.runner.stop()
    place = run.stage(1, "collect").location
    [report, _] = sorted(name for name in place.tree() if name.endswith(f"/{REPORT}"))
    place.delete(report)

    lane = Lane(run, engine)
    lane.transfer(0)
    reference = Collecting(lane, 1).result()
    lane.runner.stop()
    assert len(threads.began) == SHARDS
    assert len(engine.answered) == TASKS * GROUP * CALLS
    assert reference.counts["completed"] == TASKS * GROUP
    assert made(run, 1) == {spec.rollout_id: spec.seed for spec in lane.plan.specs(1)}
    shards = read_manifest(reference).details["distribution"]["shards"]
    assert [shard["attempt"] for shard in shards] == [2, 1]
    assert verify(str(tmp_path)).problems == []


def test_a_shard_admitted_while_weights_are_on_their_way_begins_when_they_are_there(
    tmp_path: Path, engine: VersionedEngine, threads: Threads
) -> None:
    run = open_run(parse_config(settings(str(tmp_path), mode="fully-async")))
    lane = Lane(run, engine)
    lane.transfer(0)
    Collecting(lane, 1).result()
    lane.train(1)
    lane.dispatch.tell(happened.TransferStarted(ENGINE, 1))
    ahead = Collecting(lane, 2)
    until(lambda: len(lane.controller.pool.running) == TASKS * GROUP)
    assert len(threads.began) == SHARDS, "admitted, and waiting for weights"
    engine.version = 1
    lane.dispatch.tell(happened.TransferFinished(ENGINE, 1))
    assert read_manifest(ahead.result()).details["rollouts_by_age"] == {"0": TASKS * GROUP}
    lane.runner.stop()
    assert {version for k, _, version, _ in threads.began if k == 2} == {1}
