from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import ValidationError

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import restore, snapshot, state_from_json
from roundhouse.collection.controller import (
    Block,
    Continue,
    Controller,
    Hold,
    Train,
    Transfer,
    event_from_json,
    event_to_json,
    replay,
)
from roundhouse.collection.pool import StalenessBound
from roundhouse.config.rollout import Asynchrony
from roundhouse.errors import ConfigError, DataError
from tests.asynchrony.world import check, copy, crashes, faults, forward, lost_and_found, terms


def serving(limits: StalenessBound, *replicas: str) -> Controller:
    """Every replica holds version 0."""
    controller = Controller(limits, replicas)
    for name in replicas:
        controller.apply(happened.TransferStarted(name, 0))
        controller.apply(happened.TransferFinished(name, 0))
    return controller


def roll_out(controller: Controller, replica: str, count: int = 1) -> None:
    """Begin and finish so many rollouts."""
    for _ in range(count):
        answer = controller.admission(replica)
        assert isinstance(answer, Continue), answer
        controller.apply(happened.RolloutStarted(answer.position, answer.sample, answer.attempt, replica))
        controller.apply(happened.RolloutFinished(answer.position, answer.sample, answer.attempt))


def train(controller: Controller) -> tuple[int, ...]:
    step = controller.training()
    assert step is not None
    controller.apply(happened.TrainingStarted(step.iteration, step.groups))
    controller.apply(happened.TrainingFinished(step.iteration))
    return step.groups


@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
def test_a_rollout_is_blocked_exactly_when_train_version_plus_one_minus_rollout_version_is_above_the_threshold(
    threshold,
):
    controller = serving(terms("batch-async", threshold, iterations=8), "a")
    for train_version in range(-1, 7):  # the version that the trainer holds when the iteration before this one's begins
        answer = controller.admission("a")
        blocked = train_version + 1 - 0 > threshold
        assert isinstance(answer, Block) == blocked
        if blocked:
            break
        roll_out(controller, "a")


def test_sync_trains_between_rollouts_and_never_beside_them():
    controller = serving(terms("sync", groups=2, iterations=2), "a", "b")
    roll_out(controller, "a", 2)
    assert controller.admission("a") == Block(Hold.TRAINING)
    assert train(controller) == (0, 1)
    assert controller.admission("a") == Block(Hold.WEIGHTS)
    assert controller.transfer("a") == Transfer("a", 1)
    controller.apply(happened.TransferStarted("a", 1))
    assert controller.admission("a") == Block(Hold.TRANSFER)
    controller.apply(happened.TransferFinished("a", 1))
    assert controller.admission("a") == Block(Hold.BARRIER), "b still has the old weights"
    controller.apply(happened.TransferStarted("b", 1))
    controller.apply(happened.TransferFinished("b", 1))
    assert controller.admission("a") == Continue(2, 0, 1, 1)


def test_fully_async_begins_on_the_weights_that_are_coming():
    controller = serving(terms("fully-async", 1, iterations=4), "a")
    roll_out(controller, "a", 2)
    assert controller.admission("a") == Block(Hold.TRAINING), (
        "a bound is a bound on how far ahead to run, and this is its end"
    )
    train(controller)
    controller.apply(happened.TransferStarted("a", 1))
    assert controller.admission("a") == Continue(2, 0, 1, 1)
    controller.apply(happened.RolloutStarted(2, 0, 1, "a"))
    controller.apply(happened.TransferFailed("a", "checksum"))
    assert controller.admission("a") == Block(Hold.OUT_OF_SERVICE)
    assert controller.transfer("a") == Transfer("a", 1)
    controller.apply(happened.TransferStarted("a", 1))
    controller.apply(happened.TransferFinished("a", 1))
    assert controller.admission("a") == Continue(2, 0, 2, 1), "what was lost with the weights begins again"


def test_every_mode_gives_every_version_to_every_replica():
    for mode, staleness in (("sync", 0), ("batch-async", 2), ("fully-async", 2)):
        controller = serving(terms(mode, staleness, iterations=3), "a")
        for version in (1, 2):
            roll_out(controller, "a")
            train(controller)
            assert controller.transfer("a") == Transfer("a", version), mode
            controller.apply(happened.TransferStarted("a", version))
            controller.apply(happened.TransferFinished("a", version))


def test_with_finish_a_replica_keeps_its_weights_until_its_rollouts_have_ended():
    controller = serving(terms("batch-async", 1, iterations=4, refit="drain"), "a")
    roll_out(controller, "a")
    controller.apply(happened.RolloutStarted(1, 0, 1, "a"))
    train(controller)
    assert controller.transfer("a") is None
    assert controller.admission("a") == Block(Hold.WEIGHTS)
    controller.apply(happened.RolloutFinished(1, 0, 1))
    assert controller.transfer("a") == Transfer("a", 1)


def test_a_slow_group_is_waited_for_though_others_are_ready():
    controller = serving(terms("batch-async", 3, groups=2, iterations=4), "a", "b")
    controller.apply(happened.RolloutStarted(0, 0, 1, "b"))
    roll_out(controller, "a", 7)
    assert controller.training() is None
    controller.apply(happened.RolloutFinished(0, 0, 1))
    assert controller.training() == Train(1, (0, 1))


def test_a_window_passes_over_a_slow_group_and_takes_it_before_it_is_too_old():
    controller = serving(terms("windowed", 2, groups=1, iterations=4, window=2), "a", "b")
    controller.apply(happened.RolloutStarted(0, 0, 1, "b"))
    roll_out(controller, "a")
    assert train(controller) == (1,)
    assert controller.training() is None, "2 lies outside of the window, whose oldest is 0"
    controller.apply(happened.RolloutFinished(0, 0, 1))
    assert train(controller) == (0,)


def in_two_rounds(**settings: int) -> Controller:
    """Two groups an iteration, in two rounds at most; the first round of iteration 1 is complete, and 2 has begun."""
    controller = serving(terms("batch-async", 1, groups=2, iterations=3, rounds=2, **settings), "a")
    roll_out(controller, "a", 2 * settings.get("group_size", 1))
    assert controller.admission("a") == Continue(4, 0, 1, 0), "iteration 2 need not wait for the decision"
    assert controller.training() is None, "it is open whether there is another round"
    return controller


def test_a_further_round_begins_before_later_iterations_and_is_trained_on_with_the_first():
    controller = in_two_rounds()
    controller.apply(happened.RoundStarted(1, 2))
    assert controller.admission("a") == Continue(2, 0, 1, 0)
    roll_out(controller, "a", 2)
    assert controller.training() is None
    with pytest.raises(DataError, match="has begun 2 of 2"):
        controller.apply(happened.RoundStarted(1, 3))
    controller.apply(happened.RoundsEnded(1, 2))
    assert train(controller) == (0, 1, 2, 3)
    assert controller.admission("a") == Continue(4, 0, 1, 0)
    roll_out(controller, "a", 2)
    controller.apply(happened.RoundsEnded(2, 1))
    assert train(controller) == (4, 5), "the second round of iteration 2 was never drawn"


def test_a_round_whose_rollout_was_lost_is_decided_on_again_and_the_next_one_has_not_begun():
    controller = in_two_rounds()
    controller.apply(happened.RoundStarted(1, 2))
    controller.apply(happened.RolloutStarted(2, 0, 1, "a"))
    controller.apply(happened.RolloutEvicted(0, 0, "lost"))
    assert not controller.replicas["a"].running
    with pytest.raises(DataError, match="Attempt 1 at rollout 2/0"):
        controller.apply(happened.RolloutFinished(2, 0, 1))
    roll_out(controller, "a")
    controller.apply(happened.RoundStarted(1, 2, ((3, 0, 0),)))
    assert controller.admission("a") == Continue(2, 0, 2, 0)
    roll_out(controller, "a")
    assert controller.admission("a") == Continue(4, 0, 1, 0), "what was in the store of the round is not made again"
    controller.apply(happened.RoundsEnded(1, 2))
    assert controller.training() == Train(1, (0, 1, 2, 3))


@pytest.mark.parametrize(
    "event",
    [
        happened.RoundStarted(2, 2),
        happened.RoundStarted(1, 3),
        happened.RoundStarted(1, 2, ((4, 0, 0),)),
        happened.RoundStarted(1, 2, ((2, 0, -2),)),
        happened.RoundsEnded(1, 2),
        happened.RoundsEnded(2, 1),
    ],
)
def test_a_round_that_cannot_have_begun_or_ended_is_refused_and_changes_nothing(event):
    controller = in_two_rounds()
    before = snapshot(controller)
    with pytest.raises(DataError, match=r"[Ii]teration \d"):
        controller.apply(event)
    assert snapshot(controller) == before


def test_a_crash_in_a_further_round_keeps_what_is_in_the_store_of_rounds_that_had_begun():
    controller = in_two_rounds(group_size=2)
    controller.apply(happened.Restarted(0, ((2, 0, 0),), (("a", 0),)))
    assert controller.pool.rounds_of(1) == 1, (
        "nobody had decided on the second round: its rollouts count when it begins"
    )
    controller.apply(happened.RoundStarted(1, 2))
    controller.apply(happened.RolloutStarted(2, 0, 1, "a"))
    controller.apply(happened.Restarted(0, ((2, 0, 0),), (("a", 0),)))
    assert controller.admission("a") == Continue(2, 1, 1, 0)


def test_a_skipped_iteration_takes_all_of_its_rounds_along():
    controller = in_two_rounds()
    controller.apply(happened.RoundStarted(1, 2))
    controller.apply(happened.RolloutStarted(2, 0, 1, "a"))
    controller.apply(happened.IterationSkipped(1, "too few sequences"))
    assert controller.admission("a") == Continue(4, 0, 1, 0)
    assert snapshot(controller).rounds == snapshot(controller).attempts == []


def test_a_state_without_rounds_is_one_of_a_run_without_them_and_other_limits_are_refused():
    plain = Controller(terms("batch-async", 1, groups=2), "a")
    written = json.loads(snapshot(plain).model_dump_json())
    for name in ("rounds_an_iteration", "rounds", "ended"):
        del written[name]
    assert snapshot(restore(plain.terms, state_from_json(json.dumps(written)))) == snapshot(plain)
    with pytest.raises(DataError, match=r"2 rounds an iteration at most, not of 3 .*max_rounds.*Take the change back"):
        restore(terms("batch-async", 1, groups=2, rounds=3), snapshot(in_two_rounds()))


def test_a_step_that_waits_for_all_that_has_begun_passes_over_no_slow_group():
    limits = terms("windowed", 2, groups=1, iterations=4, window=2, ready="loaded_batch_finished")
    controller = serving(limits, "a", "b")
    controller.apply(happened.RolloutStarted(0, 0, 1, "b"))
    roll_out(controller, "a")
    assert controller.training() is None, "group 0 has begun and is not complete"
    controller.apply(happened.RolloutFinished(0, 0, 1))
    assert train(controller) == (0,)


def test_an_evaluation_holds_the_weights_and_a_step_does_not_overtake_it():
    controller = serving(terms("batch-async", 2, iterations=4, every=1), "a")
    controller.apply(happened.ValidationStarted(0))
    roll_out(controller, "a")
    train(controller)
    assert controller.transfer("a") is None, "version 0 is being evaluated on it"
    controller.apply(happened.ValidationEnded(0))
    roll_out(controller, "a")
    train(controller)
    assert controller.transfer("a") == Transfer("a", 1), "version 1 is to be evaluated before 2"


def test_an_interrupted_step_is_repeated_on_the_same_groups():
    controller = serving(terms("windowed", 2, groups=1, iterations=4, window=2), "a", "b")
    controller.apply(happened.RolloutStarted(0, 0, 1, "b"))
    roll_out(controller, "a")
    controller.apply(happened.TrainingStarted(1, (1,)))
    controller.apply(happened.RolloutFinished(0, 0, 1))
    controller.apply(happened.Restarted(0, (), (("a", 0), ("b", 0))))
    assert controller.training() == Train(1, (1,)), "its validate stage may be in the store already"


def test_the_late_word_of_an_attempt_that_was_given_up_is_refused():
    controller = serving(terms("batch-async", 1), "a", "b")
    controller.apply(happened.RolloutStarted(0, 0, 1, "a"))
    controller.apply(happened.ReplicaLost("a", "preempted"))
    assert controller.admission("b") == Continue(0, 0, 2, 0)
    controller.apply(happened.RolloutStarted(0, 0, 2, "b"))
    with pytest.raises(DataError, match="Attempt 1 at rollout 0/0"):
        controller.apply(happened.RolloutFinished(0, 0, 1))
    controller.apply(happened.RolloutFinished(0, 0, 2))
    with pytest.raises(DataError, match="stale or a duplicate"):
        controller.apply(happened.RolloutFinished(0, 0, 2))


def test_a_checkpoint_of_another_run_is_refused():
    controller = serving(terms("batch-async", 1), "a")
    with pytest.raises(DataError, match=r"version 2, the controller's state of 0.*not of one run"):
        controller.apply(happened.Restarted(2, (), ()))


def test_a_replica_with_weights_that_none_should_have_yet_is_given_others_first():
    controller = serving(terms("batch-async", 1), "a")
    controller.apply(happened.ReplicaJoined("b", 5))
    assert controller.admission("b") == Block(Hold.OUT_OF_SERVICE)
    assert controller.transfer("b") == Transfer("b", 0)


def test_the_state_does_not_grow_with_the_run():
    sizes = []
    controller = serving(terms("batch-async", 2, groups=4, group_size=4, iterations=200), "a")
    for version in range(1, 200):
        roll_out(controller, "a", 16)
        train(controller)
        controller.apply(happened.TransferStarted("a", version))
        controller.apply(happened.TransferFinished("a", version))
        sizes.append(len(snapshot(controller).model_dump_json()))
    assert max(sizes) < 500


def test_a_state_of_another_schema_is_refused():
    state = json.loads(snapshot(Controller(terms("sync"), "a")).model_dump_json())
    with pytest.raises(DataError, match="Replay its journal"):
        state_from_json(json.dumps(state | {"schema_version": 2}))
    with pytest.raises(DataError, match="is not an event"):
        event_from_json('{"event": "Nothing"}')


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "sync", "staleness": 1}, r"staleness is 1, but mode sync.*Set staleness to 0"),
        ({"mode": "batch-async", "window": 2, "staleness": 3}, "window is 2, but mode is batch-async"),
        ({"mode": "windowed", "window": 2, "staleness": 1}, "window is 2 and staleness 1"),
        ({"mode": "batch-async", "staleness": 1, "ready": "loaded_batch_finished"}, "ready is loaded_batch_finished"),
        ({"mode": "fully-async", "staleness": 1, "refit": "drain"}, "refit is drain"),
        ({"mode": "fully-async"}, "staleness is 0, .*mode is fully-async. Set staleness to 1 or more, or mode to sync"),
        ({"mode": "windowed"}, "staleness is 0, .*mode is windowed"),
    ],
)
def test_what_cannot_hold_the_bound_is_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        Asynchrony.model_validate(settings)


def test_a_window_that_no_bound_covers_is_refused_with_the_bound_that_would():
    with pytest.raises(ConfigError, match=r"window is 10 with 4 groups.*Raise it to 4"):
        terms("windowed", 2, groups=4, window=10)
    assert terms("windowed", 4, groups=4, window=10).start_lag == 1


class AnyOrder(RuleBasedStateMachine):
    """Larger plans than can be explored, in any order, with any faults."""

    @initialize(
        mode=st.sampled_from(["sync", "batch-async", "fully-async", "windowed"]),
        staleness=st.integers(0, 3),
        groups=st.integers(1, 3),
        size=st.integers(1, 3),
        rounds=st.integers(1, 3),
        window=st.integers(1, 5),
        every=st.integers(0, 2),
        finish=st.booleans(),
        replicas=st.sampled_from(["a", "ab"]),
    )
    def plan(self, mode, staleness, groups, size, rounds, window, every, finish, replicas):
        asked = {"refit": "drain"} if finish and mode != "fully-async" else {}
        if mode == "windowed":
            staleness, asked = max(2, staleness), asked | {"window": min(window, groups + 1)}
        else:
            staleness, asked = max(int(mode == "fully-async"), staleness), asked | {"rounds": rounds}
        self.terms = terms(
            mode, 0 if mode == "sync" else staleness, groups=groups, group_size=size, iterations=4, every=every, **asked
        )
        self.names, self.slots, self.journal = replicas, 3, []
        self.controller = Controller(self.terms, replicas)
        self.trained: list[int] = []

    def tell(self, event) -> None:
        line = event_to_json(event)
        assert event_from_json(line) == event
        chosen = self.controller.batch if self.terms.chooses else None
        left, version = chosen or self.controller.pool.oldest(), self.controller.version
        self.controller.apply(event)
        self.journal.append(line)
        if self.controller.version > version:
            self.trained += left

    @rule(data=st.data())
    def goes_on(self, data):
        events = [*forward(self.controller, self.slots), *lost_and_found(self.controller, self.names)]
        if events:
            self.tell(data.draw(st.sampled_from(events)))

    @precondition(lambda self: len(self.journal) % 3 == 2)
    @rule(data=st.data())
    def fails(self, data):
        if events := list(faults(self.controller)):
            self.tell(data.draw(st.sampled_from(events)))

    @rule()
    def is_kept_and_read_again(self):
        self.controller = restore(self.terms, state_from_json(snapshot(self.controller).model_dump_json()))

    @invariant()
    def promises_hold(self):
        if hasattr(self, "controller"):
            check(self.controller)
            assert len(self.trained) == len(set(self.trained)) == self.controller.version * self.terms.positions

    def teardown(self):
        if not hasattr(self, "controller"):
            return
        again = replay(self.terms, self.names, map(event_from_json, self.journal))
        assert snapshot(again) == snapshot(self.controller), "the journal makes the state again"
        for crash in crashes(self.controller):
            resumed = copy(self.controller)
            resumed.apply(crash)
            check(resumed)
            finish_plan(resumed, self.slots, self.names)
        finish_plan(self.controller, self.slots, self.names)


def finish_plan(controller: Controller, slots: int, names: str) -> None:
    """Whatever came before, a world without faults ends with every group trained."""
    for _ in range(2000):
        if controller.finished:
            assert controller.pool.head == controller.terms.total
            return
        events = [*forward(controller, slots), *lost_and_found(controller, names)]
        assert events, "a deadlock"
        controller.apply(events[0])
        check(controller)
    raise AssertionError("the plan does not end")


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=40)
