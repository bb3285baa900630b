"""The controller's state as JSON, so that a store can keep it.

Invariant: `restore(terms, snapshot(controller))` answers every question as the controller does, and so does a replay of its
journal. The size grows with what has begun and is not trained, never with the run's length.
"""

from __future__ import annotations

import heapq
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.collection.bound import StalenessBound
from roundhouse.collection.controller import Controller, ReplicaStatus
from roundhouse.collection.rollouts import Group, RunningRollout
from roundhouse.errors import DataError


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GroupState(_Part):
    position: int
    versions: list[tuple[int, int]]
    """(sample, oldest version) of what finished."""
    failed: list[int]


class RunningState(_Part):
    position: int
    sample: int
    replica: str
    version: int


class ReplicaState(_Part):
    name: str
    version: int | None
    incoming: int | None


class ControllerState(_Part):
    """Everything that a controller remembers, in an order that does not depend on how it came about."""

    schema_version: Literal[1] = 1
    groups_an_iteration: int
    group_size: int
    start_lag: int
    """How early what is in here may have begun."""
    version: int
    batch: list[int] | None
    in_training: bool
    evaluated: int
    evaluating: int | None
    cursor: int
    again: list[tuple[int, int]]
    attempts: list[tuple[int, int, int]]
    head: int
    trained_ahead: list[int]
    groups: list[GroupState]
    running: list[RunningState]
    replicas: list[ReplicaState]


def snapshot(controller: Controller) -> ControllerState:
    """The state as it is now."""
    rollouts = controller.rollouts
    return ControllerState(
        groups_an_iteration=controller.terms.groups,
        group_size=controller.terms.group_size,
        start_lag=controller.terms.start_lag,
        version=controller.version,
        batch=None if controller.batch is None else list(controller.batch),
        in_training=controller.in_training,
        evaluated=controller.evaluated,
        evaluating=controller.evaluating,
        cursor=rollouts.cursor,
        again=sorted(rollouts.again),
        attempts=sorted((*key, count) for key, count in rollouts.attempts.items()),
        head=rollouts.head,
        trained_ahead=sorted(rollouts.trained_ahead),
        groups=[
            GroupState(position=position, versions=sorted(group.versions.items()), failed=sorted(group.failed))
            for position, group in sorted(rollouts.groups.items())
        ],
        running=[
            RunningState(position=key[0], sample=key[1], replica=running.replica, version=running.version)
            for key, running in sorted(rollouts.running.items())
        ],
        replicas=[
            ReplicaState(name=name, version=place.version, incoming=place.incoming)
            for name, place in sorted(controller.replicas.items())
        ],
    )


def restore(terms: StalenessBound, state: ControllerState) -> Controller:
    """A controller in this state; the terms may have become wider, not narrower.

    Raises:
        DataError: the terms are of another plan, or their bound could be broken by what has begun.
    """
    if (terms.groups, terms.group_size) != (state.groups_an_iteration, state.group_size):
        raise DataError(
            f"The controller's state is of {state.groups_an_iteration} groups of {state.group_size} an iteration, not of "
            f"{terms.groups} groups of {terms.group_size}. Take the change back, or start a new run."
        )
    if terms.start_lag < state.start_lag:
        raise DataError(
            f"Rollouts have begun up to {state.start_lag} versions early, and asynchrony.staleness "
            f"{terms.asynchrony.staleness} with window {terms.asynchrony.window} allows {terms.start_lag}. Keep the bound that "
            "the run began with, or raise it."
        )
    controller = Controller(terms)
    controller.replicas = {place.name: ReplicaStatus(place.version, place.incoming) for place in state.replicas}
    controller.version, controller.evaluated, controller.evaluating = state.version, state.evaluated, state.evaluating
    controller.batch = None if state.batch is None else tuple(state.batch)
    controller.in_training = state.in_training
    rollouts = controller.rollouts
    rollouts.cursor, rollouts.head, rollouts.trained_ahead = state.cursor, state.head, set(state.trained_ahead)
    rollouts.again = list(state.again)
    heapq.heapify(rollouts.again)
    rollouts.attempts = {(position, sample): count for position, sample, count in state.attempts}
    for group in state.groups:
        rollouts.groups[group.position] = Group(dict(group.versions), set(group.failed))
        if len(group.versions) + len(group.failed) == terms.group_size:
            rollouts.complete.add(group.position)
            iteration = group.position // terms.groups
            rollouts.complete_of[iteration] = rollouts.complete_of.get(iteration, 0) + 1
    for item in state.running:
        rollouts.running[(item.position, item.sample)] = RunningRollout(item.replica, item.version)
        controller.replicas[item.replica].running.add((item.position, item.sample))
    return controller


def state_from_json(text: str | bytes) -> ControllerState:
    """A state that was kept.

    Raises:
        DataError: it is damaged, or of another version of the schema.
    """
    try:
        return ControllerState.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"The controller's state cannot be read: {error}. Replay its journal instead.") from None
