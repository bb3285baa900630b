from __future__ import annotations

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous import controller_journal as journal_module
from roundhouse.collection.asynchronous.controller_journal import ControllerJournal, snapshot
from roundhouse.collection.controller import Controller
from roundhouse.collection.runner import Dispatch
from roundhouse.errors import DataError, StoreError
from roundhouse.store.bucket import StoreUnavailable
from roundhouse.store.location import Location
from tests.asynchrony.world import forward, terms


def run_on(controller: Controller, journal: ControllerJournal, steps: int, keep_every: int = 0) -> None:
    """Apply what can happen, the last of it each time, and write it down, ten events at once."""
    told = []
    for step in range(1, steps + 1):
        told.append(list(forward(controller, slots=2))[-1])
        controller.apply(told[-1])
        if step % 10 == 0 or step == steps:
            journal.append(told)
            told = []
            if keep_every and step % keep_every == 0:
                journal.keep_state(controller)


@pytest.mark.parametrize("keep_every", [0, 20])
def test_a_new_process_finds_the_controller_as_the_old_one_left_it(store_uri, keep_every):
    plan = terms("batch-async", 2, groups=2, group_size=2, iterations=20)
    place = Location(store_uri) / "asynchrony"
    first, journal = Controller(plan, "ab"), ControllerJournal(place)
    run_on(first, journal, 60, keep_every)
    second = ControllerJournal(place).load(plan, "ab")
    assert snapshot(second) == snapshot(first)
    assert first.pool.cursor > 4
    assert len([name for name in place.names() if name.startswith("state-")]) == (2 if keep_every else 0)
    run_on(second, again := ControllerJournal(place), 10)
    assert len(list(again.events())) == 70


def test_of_two_controllers_of_one_run_one_is_told_to_stop(store_uri):
    place = Location(store_uri) / "asynchrony"
    one, other = ControllerJournal(place), ControllerJournal(place)
    one.append([happened.TransferStarted("a", 0)])
    for _ in range(2):
        with pytest.raises(StoreError, match="another controller of this run"):
            other.append([happened.TransferStarted("b", 0)])
    assert list(ControllerJournal(place).events()) == [happened.TransferStarted("a", 0)]


@pytest.mark.parametrize(("moment", "arrives"), [("create", False), ("create", True), ("names", False)])
def test_events_whose_write_failed_are_written_before_any_others(store_uri, monkeypatch, moment, arrives):
    plan, place = terms("batch-async", 2, groups=2, iterations=20), Location(store_uri) / "asynchrony"
    dispatch, told, method = Dispatch(Controller(plan, "ab"), ControllerJournal(place)), [], getattr(Location, moment)

    def fails(self, *arguments):
        if arrives:
            method(self, *arguments)
        raise StoreUnavailable("no answer after 9 attempts in 60 s")

    for is_away in (False, True, True, False):
        for _ in range(5):
            told.append(list(forward(dispatch.controller, slots=2))[-1])
            dispatch.tell(told[-1])
        with monkeypatch.context() as away:
            if is_away:
                away.setattr(Location, moment, fails)
                with pytest.raises(StoreUnavailable):
                    dispatch.record()
            else:
                dispatch.record(keep_state=len(told) > 5)
    assert list(ControllerJournal(place).events()) == told
    place.write("state-00000004.json", b"damaged")
    assert snapshot(ControllerJournal(place).load(plan, "ab")) == snapshot(dispatch.controller)


def test_segments_that_two_states_stand_for_go_and_nothing_is_forgotten(store_uri, monkeypatch):
    monkeypatch.setattr(journal_module, "KEPT_SEGMENTS", 3)
    plan = terms("batch-async", 2, groups=2, group_size=2, iterations=40)
    place = Location(store_uri) / "asynchrony"
    controller, journal = Controller(plan, "ab"), ControllerJournal(place)
    run_on(controller, journal, 200, keep_every=20)
    assert journal.segments == 20
    left = sorted(name for name in place.names() if name.startswith("events-"))
    assert left == [f"events-{number:08d}.jsonl" for number in range(16, 21)], "three before the older state, two after"
    again = ControllerJournal(place)
    assert again.segments == 20, "the next one has the next number"
    assert snapshot(again.load(plan, "ab")) == snapshot(controller)
    place.write("state-00000020.json", b"damaged")
    assert snapshot(ControllerJournal(place).load(plan, "ab")) == snapshot(controller)
    place.write("state-00000018.json", b"damaged")
    with pytest.raises(DataError, match=r"events-00000001.jsonl is missing"):
        ControllerJournal(place).load(plan, "ab")


def test_a_controller_that_slept_while_its_segments_went_is_told_to_stop_too(store_uri, monkeypatch):
    monkeypatch.setattr(journal_module, "KEPT_SEGMENTS", 0)
    plan = terms("batch-async", 2, groups=2, group_size=2, iterations=40)
    place = Location(store_uri) / "asynchrony"
    slept = ControllerJournal(place)
    controller, journal = Controller(plan, "ab"), ControllerJournal(place)
    run_on(controller, journal, 100, keep_every=20)
    before = place.names()
    assert "events-00000001.jsonl" not in before
    with pytest.raises(StoreError, match=r"events-00000001.jsonl was written by another controller of this run"):
        slept.append([happened.TransferStarted("a", 0)])
    assert place.names() == before, "and leaves nothing"
    assert snapshot(ControllerJournal(place).load(plan, "ab")) == snapshot(controller)


def test_a_damaged_state_costs_a_replay_and_nothing_else(tmp_path):
    plan = terms("batch-async", 1, groups=2, iterations=8)
    place = Location(str(tmp_path))
    controller, journal = Controller(plan, "a"), ControllerJournal(place)
    run_on(controller, journal, 30, keep_every=10)
    for name in place.names():
        if name.startswith("state-"):
            place.write(name, place.read(name)[:-9])
    assert snapshot(ControllerJournal(place).load(plan, "a")) == snapshot(controller)


def test_a_run_goes_on_with_a_wider_bound_and_not_with_a_narrower_one(tmp_path):
    journal = ControllerJournal(Location(str(tmp_path)))
    controller = Controller(terms("batch-async", 2, groups=2), "a")
    run_on(controller, journal, 12)
    journal.keep_state(controller)
    assert journal.load(terms("fully-async", 3, groups=2, iterations=9), "a").terms.start_lag == 3
    with pytest.raises(DataError, match=r"2 versions early.*staleness 1"):
        journal.load(terms("batch-async", 1, groups=2), "a")
    with pytest.raises(DataError, match="2 groups of 1 an iteration, not of 3 groups"):
        journal.load(terms("batch-async", 2, groups=3), "a")
