"""A run that was killed anywhere: its controller comes back from the store, and agrees with it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import PLACE, ControllerJournal, resume
from roundhouse.collection.asynchronous.plan import Plan, bound_of, generated_in
from roundhouse.collection.controller import Controller
from roundhouse.collection.pool import Key
from roundhouse.collection.runner import ENGINE
from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.stages.checkpoint import skip_iteration
from roundhouse.store.run import Run, Skip, open_run
from roundhouse.store.stage import Attempt
from roundhouse.trajectories.records import Rollout, Status, Turn
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.asynchrony.test_controller import finish_plan
from tests.asynchrony.world import check, forward

OWN_GROUPS = {"mode": "batch-async", "staleness": 2}
WINDOW = {"mode": "windowed", "staleness": 3, "window": 3}


def new_run(place: str, asynchrony: dict[str, object] = OWN_GROUPS, max_rounds: int = 0, **generation: object) -> Run:
    sampling = {"dynamic_sampling": {"max_rounds": max_rounds}} if max_rounds else {}
    run = open_run(
        parse_config(
            {
                "run_id": "r",
                "store": place,
                "iterations": 4,
                "rollout": {"prompts_per_iteration": 2, "group_size": 2} | sampling,
                "generation": generation,
                "asynchrony": asynchrony,
                "evaluation": {"every": 0},
            }
        )
    )
    publish(run, 0)
    return run


def publish(run: Run, version: int) -> None:
    run.point_to(run.begin(run.checkpoint(version), policy_version=version).commit())


@dataclass
class World:
    """Store of a simulated run; each fact is stored before its event is reported."""

    run: Run
    plan: Plan
    controller: Controller
    events: list[happened.Event] = field(default_factory=list)
    durable: int = 0
    """Events that were certainly written down."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    on_disk: dict[Key, int] = field(default_factory=dict)
    """Oldest version by rollout."""

    def tell(self, event: happened.Event) -> None:
        if isinstance(event, happened.RolloutFinished):
            self.write((event.position, event.sample))
        if isinstance(event, happened.TrainingFinished):
            publish(self.run, event.iteration)
        self.controller.apply(event)
        self.events.append(event)
        if isinstance(event, happened.TrainingStarted):
            self.durable = len(self.events)
            self.commit()

    def commit(self) -> None:
        """The stages of which everything was decided on; where groups are chosen, some of them may be late."""
        for iteration, attempt in list(self.attempts.items()):
            if all(self.controller.has_decided(position) for position in self.plan.groups(iteration)):
                attempt.commit()
                del self.attempts[iteration]

    def has_committed(self, key: Key) -> bool:
        return generated_in(self.run, self.plan.iteration_of(key[0])).reference() is not None

    def write(self, key: Key) -> None:
        """Write the outcome of a rollout as a separate part."""
        spec, iteration = self.plan.spec(key), self.plan.iteration_of(key[0])
        version = self.controller.pool.running[key].version
        if iteration not in self.attempts:
            self.attempts[iteration] = self.run.begin(generated_in(self.run, iteration), policy_version=version)
        turns = [Turn(0, None, [1], 1, "d", [2], [-0.1], version, "stop", 0.1)]
        rollout = Rollout(spec.group_id, spec.sample, spec.row, "e", Status.COMPLETED, reward=1.0, turns=turns)
        self.attempts[iteration].write_table("turns", turns_table([rollout]))
        self.attempts[iteration].write_table("rollouts", rollouts_table([rollout]))
        self.on_disk[key] = version

    def lose(self, key: Key) -> None:
        """The part of a finished rollout is damaged."""
        place = generated_in(self.run, self.plan.iteration_of(key[0])).location
        spec = self.plan.spec(key)
        for name in place.names():
            if name.startswith("rollouts-") and spec.rollout_id.encode() in place.read(name):
                place.write(name, b"damaged")
        del self.on_disk[key]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    ("asynchrony", "max_rounds"),
    [(OWN_GROUPS, 0), (WINDOW, 0), (OWN_GROUPS, 3)],
    ids=["own groups", "window", "rounds"],
)
def test_whatever_was_killed_when_the_controller_agrees_with_the_store_and_the_plan_can_be_finished(
    asynchrony, max_rounds, data
):
    with tempfile.TemporaryDirectory() as place:
        run = new_run(place, asynchrony, max_rounds)
        plan = Plan(run)
        world = World(run, plan, Controller(bound_of(run), [ENGINE]))
        journal = ControllerJournal(run.location / PLACE)
        world.tell(happened.Restarted(0, (), ((ENGINE, None),)))
        for _ in range(data.draw(st.integers(0, 60), label="steps")):
            if events := list(forward(world.controller, 3)):
                world.tell(data.draw(st.sampled_from(events)))
        for key in data.draw(st.sets(st.sampled_from(sorted(world.controller.pool.running) or [None])), label="untold"):
            if key is not None:
                world.write(key)
        told = data.draw(st.integers(world.durable, len(world.events)), label="written down")
        journal.append(world.events[:told])
        version = run.latest_checkpoint().policy_version
        pool = world.controller.pool
        open_keys = sorted(
            key for key in world.on_disk if not world.has_committed(key) and not world.controller.has_decided(key[0])
        )
        for key in data.draw(st.sets(st.sampled_from(open_keys or [None]), max_size=2), label="damaged"):
            if key is not None:
                world.lose(key)

        resumed = resume(run, plan).controller

        assert resumed.version == version
        assert not resumed.pool.running
        expected = {
            key: oldest
            for key, oldest in world.on_disk.items()
            if not pool.has_left(key[0]) and has_begun(resumed, key)  # else it counts when its round begins again
        }
        found = {
            (position, sample): oldest
            for position, group in resumed.pool.groups.items()
            for sample, oldest in group.versions.items()
        }
        assert found == expected
        check(resumed)
        finish_plan(resumed, 3, [ENGINE])


def has_begun(controller: Controller, key: Key) -> bool:
    terms = controller.terms
    return terms.round_of(key[0]) <= controller.pool.rounds_of(terms.iteration_of(key[0]))


def test_a_skipped_iteration_that_the_controller_never_heard_of_is_taken_in(tmp_path):
    run = new_run(str(tmp_path))
    resume(run, Plan(run))
    skip_iteration(run, 1, Skip("too_few_rollouts", "infra", "…", "…"))
    resumed = resume(run, Plan(run)).controller
    assert resumed.version == 1
    assert resumed.pool.next() == (2, 0)
    check(resumed)


def test_a_journal_that_is_lost_is_refused_with_the_way_on(tmp_path):
    run = new_run(str(tmp_path))
    publish(run, 1)
    publish(run, 2)
    with pytest.raises(StoreError, match=r"does not go with the checkpoints.*fork the run: --set resume.path=.*000002"):
        resume(run, Plan(run))


def test_the_plan_of_a_key_is_the_rollout_that_a_synchronous_iteration_makes(tmp_path):
    run = new_run(str(tmp_path))
    plan = Plan(run)
    assert [plan.spec(key) for key in plan.keys(3)] == list(plan.specs(3))
    assert [plan.iteration_of(position) for position, _ in plan.keys(3)] == [3, 3, 3, 3]
