"""All orders of events in small instances: the controller's invariants hold in every reachable state."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from roundhouse.collection.asynchronous.controller_journal import snapshot
from roundhouse.collection.controller import Controller, Transfer
from roundhouse.collection.pool import GroupPool, StalenessBound
from roundhouse.errors import DataError
from tests.asynchrony.world import check, copy, crashes, faults, forward, lost_and_found, terms


@dataclass
class Graph:
    """Reachable states; edges of a world without faults, backwards."""

    before: dict[str, set[str]] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)
    most_age: int = 0

    def stuck(self) -> set[str]:
        """States from which no faultless continuation reaches the end of the plan."""
        seen, border = set(self.ends), list(self.ends)
        while border:
            for earlier in self.before[border.pop()] - seen:
                seen.add(earlier)
                border.append(earlier)
        return self.before.keys() - seen


def explore(limits: StalenessBound, replicas: str, slots: int, budget: int, only_crashes: bool = False) -> Graph:
    """Return all states reachable with `budget` faults. Higher attempt numbers than the budget allows cannot occur."""
    graph = Graph()
    start = Controller(limits, replicas)
    border = [(start, budget)]
    seen: dict[str, int] = {}
    graph.before[_key(start)] = set()
    while border:
        controller, left = border.pop()
        here = _key(controller)
        if seen.get(here, -1) >= left:
            continue
        fresh = here not in seen
        seen[here] = left
        if fresh:
            check(controller)
            if controller.batch is not None:
                graph.most_age = max([graph.most_age, *controller.ages(controller.batch)])
            if controller.finished:
                graph.ends.add(here)
        bad = crashes(controller) if only_crashes else faults(controller)
        moves = [(event, left) for event in (*forward(controller, slots), *lost_and_found(controller, replicas))]
        moves += [(event, left - 1) for event in bad] if left else []
        for event, remaining in moves:
            after = copy(controller)
            after.apply(event)
            there = _key(after)
            graph.before.setdefault(there, set())
            if remaining == left:
                graph.before[there].add(here)
            border.append((after, remaining))
    return graph


def _key(controller: Controller) -> str:
    return snapshot(controller).model_copy(update={"attempts": []}).model_dump_json()


CASES = [
    ("sync", 0, {}),
    ("batch-async", 0, {}),
    ("batch-async", 1, {}),
    ("batch-async", 1, {"refit": "drain"}),
    ("batch-async", 2, {}),
    ("fully-async", 1, {}),
    ("windowed", 2, {"window": 2}),
    ("windowed", 2, {"window": 2, "ready": "loaded_batch_finished"}),
]


@pytest.mark.parametrize(("mode", "staleness", "settings"), CASES)
def test_with_two_faults_at_any_point_no_promise_breaks_and_the_plan_can_be_finished(mode, staleness, settings):
    limits = terms(mode, staleness, groups=1, group_size=2, iterations=2, **settings)
    graph = explore(limits, "a", slots=2, budget=2)
    assert graph.ends
    assert not graph.stuck()


@pytest.mark.parametrize(("mode", "staleness", "settings"), CASES)
def test_two_replicas_and_a_crash_at_any_point_no_promise_breaks_and_the_plan_can_be_finished(
    mode, staleness, settings
):
    limits = terms(mode, staleness, groups=1, iterations=4 if mode == "windowed" else 3, **settings)
    graph = explore(limits, "ab", slots=1, budget=1, only_crashes=True)
    assert not graph.stuck()
    never_passed_over = limits.asynchrony.ready == "loaded_batch_finished"
    reached = limits.start_lag if never_passed_over else staleness
    assert graph.most_age == reached, "the bound is reached: it is not held by doing less"


@pytest.mark.parametrize(("mode", "staleness", "settings"), CASES)
def test_evaluations_between_versions_never_stop_the_plan(mode, staleness, settings):
    limits = terms(mode, staleness, groups=1, iterations=3, every=2, **settings)
    assert not explore(limits, "ab", slots=1, budget=0).stuck()


@pytest.mark.parametrize(
    ("mode", "budget", "settings"),
    [
        ("batch-async", 2, {"rounds": 2}),
        ("fully-async", 1, {"rounds": 2, "group_size": 2}),
        ("batch-async", 1, {"rounds": 2, "groups": 2}),
    ],
)
def test_rounds_that_end_or_go_on_with_faults_at_any_point_break_no_promise_and_the_plan_can_be_finished(
    mode, budget, settings
):
    limits = terms(mode, 1, iterations=2, **settings)
    graph = explore(limits, "a", slots=2, budget=budget)
    assert not graph.stuck()
    assert graph.most_age == 1, "a further round of the second iteration may be as old as its first"


def test_a_window_over_several_iterations_holds_its_formula_and_reaches_it():
    limits = terms("windowed", 3, groups=2, iterations=4, window=4)  # 1 + ceil(3 / 2)
    graph = explore(limits, "a", slots=4, budget=0)
    assert not graph.stuck()
    assert graph.most_age == 3


def _a_rollout_too_early(monkeypatch):
    honest = StalenessBound.may_begin
    monkeypatch.setattr(
        StalenessBound, "may_begin", lambda self, position, version: honest(self, position, version + 1)
    )


def _weights_that_never_come(monkeypatch):
    monkeypatch.setattr(
        Controller, "transfer", lambda self, replica: Transfer(replica, 0) if _new(self, replica) else None
    )


def _new(controller, replica):
    place = controller.replicas[replica]
    return place.version is None and place.incoming is None


def _whatever_is_ready(monkeypatch):
    def batch(self):
        ready = sorted(self.complete)[: self.terms.groups]
        return tuple(ready) if len(ready) == self.terms.groups else None

    monkeypatch.setattr(GroupPool, "batch", batch)


def _forgotten_after_a_crash(monkeypatch):
    monkeypatch.setattr(GroupPool, "abandon", lambda self, key: self.running.pop(key))


def _trained_between_two_rounds(monkeypatch):
    def batch(self):
        iteration = self.terms.iteration_of(self.head)
        own = tuple(range(self.head, self.head + self.terms.groups * self.rounds_of(iteration)))
        return own if self.complete_of.get(iteration) == len(own) else None

    monkeypatch.setattr(GroupPool, "batch", batch)


def _a_round_that_outlives_the_one_before(monkeypatch):
    monkeypatch.setattr(GroupPool, "_close_rounds", lambda self, position: {})


def _rounds_that_never_end(monkeypatch):
    monkeypatch.setattr(GroupPool, "end_rounds", lambda self, iteration, rounds: None)


ANY_PLAN = [_a_rollout_too_early, _weights_that_never_come, _whatever_is_ready, _forgotten_after_a_crash]
IN_ROUNDS = [_trained_between_two_rounds, _a_round_that_outlives_the_one_before, _rounds_that_never_end]


@pytest.mark.parametrize(
    ("plant", "rounds"), [*((plant, 1) for plant in ANY_PLAN), *((plant, 2) for plant in IN_ROUNDS)]
)
def test_the_exploration_finds_a_planted_defect(plant, rounds, monkeypatch):
    plant(monkeypatch)
    limits = terms("batch-async", 1, groups=1, iterations=3 if rounds == 1 else 2, rounds=rounds)
    found = False
    try:
        found = bool(explore(limits, "ab", slots=1, budget=1, only_crashes=rounds == 1).stuck())
    except (AssertionError, DataError):
        found = True
    assert found
