"""Everything that can happen to a controller next, and what must hold of each of its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import restore, snapshot
from roundhouse.collection.controller import Block, Continue, Controller, Event
from roundhouse.collection.pool import StalenessBound
from roundhouse.config.rollout import Asynchrony


def terms(
    mode: str, staleness: int = 0, *, groups=1, group_size=1, iterations=3, every=0, rounds=1, **settings
) -> StalenessBound:
    asynchrony = Asynchrony.model_validate({"mode": mode, "staleness": staleness, **settings})
    return StalenessBound(
        asynchrony,
        groups=groups,
        group_size=group_size,
        iterations=iterations,
        validate_every=every,
        rounds=rounds,
    )


def forward(controller: Controller, slots: int) -> Iterator[Event]:
    """Events of a world in which nothing fails."""
    if (train := controller.training()) is not None:
        yield happened.TrainingStarted(train.iteration, train.groups)
    if controller.in_training:
        yield happened.TrainingFinished(controller.version + 1)
    if (validate := controller.validation()) is not None:
        yield happened.ValidationStarted(validate.version)
    if controller.evaluating is not None:
        yield happened.ValidationEnded(controller.evaluating)
    for name, place in controller.replicas.items():
        if (transfer := controller.transfer(name)) is not None:
            yield happened.TransferStarted(name, transfer.version)
        if place.incoming is not None:
            yield happened.TransferFinished(name, place.incoming)
        answer = controller.admission(name)
        if len(place.running) < slots and isinstance(answer, Continue):
            yield happened.RolloutStarted(answer.position, answer.sample, answer.attempt, name)
        if place.incoming is None:  # its engine is paused otherwise
            for key in place.running:
                yield happened.RolloutFinished(*key, controller.pool.attempt_of(key))
    yield from rounds(controller)


def rounds(controller: Controller) -> Iterator[Event]:
    """Yield the ends of complete rounds: enough groups have spread, or a further round begins. Its rollouts may be in the
    store after a crash."""
    limits, pool = controller.terms, controller.pool
    for iteration in list(pool.complete_of):
        if pool.awaits_round(iteration):
            drawn = pool.rounds_of(iteration)
            yield happened.RoundsEnded(iteration, drawn)
            if drawn < limits.rounds:
                yield happened.RoundStarted(iteration, drawn + 1)
                first, oldest = limits.round_positions(iteration, drawn + 1).start, iteration - 1 - limits.start_lag
                yield happened.RoundStarted(iteration, drawn + 1, ((first, 0, max(0, oldest)),))


def faults(controller: Controller) -> Iterator[Event]:
    """Yield the possible faults."""
    if controller.in_training:
        yield happened.TrainingFailed(controller.version + 1, "out of memory")
    if not controller.finished:
        yield happened.IterationSkipped(controller.version + 1, "too few rollouts")
    for name, place in controller.replicas.items():
        if place.incoming is not None:
            yield happened.TransferFailed(name, "checksum")
        for key in place.running:
            attempt = controller.pool.attempt_of(key)
            yield happened.RolloutFailed(*key, attempt, "timeout")
            yield happened.RolloutFailed(*key, attempt, "bad row", True)
        yield happened.ReplicaLost(name, "preempted")
    for position, group in controller.pool.groups.items():
        for sample in group.versions:
            if controller.batch is None or position not in controller.batch:
                yield happened.RolloutEvicted(position, sample, "capacity")
    yield from crashes(controller)


def crashes(controller: Controller) -> Iterator[happened.Restarted]:
    """Yield restarts of the process: the engine kept its weights, lost them, or the last facts were not reported."""
    kept = tuple((name, place.version) for name, place in controller.replicas.items())
    lost = tuple((name, None) for name in controller.replicas)
    untold = tuple((*key, running.version) for key, running in controller.pool.running.items())
    yield happened.Restarted(controller.version, (), kept)
    yield happened.Restarted(controller.version, untold, lost)
    yield happened.Restarted(controller.version, (), lost, tuple(controller.pool.running))
    if controller.in_training:
        yield happened.Restarted(controller.version + 1, (), kept)


def lost_and_found(controller: Controller, replicas: str) -> Iterator[Event]:
    """A lost replica's place is taken by a new one."""
    for name in sorted(set(replicas) - controller.replicas.keys()):
        yield happened.ReplicaJoined(name)


def check(controller: Controller) -> None:
    """Assert the invariants of every state."""
    limits, pool = controller.terms, controller.pool
    begun = {key for key in (divmod(n, limits.group_size) for n in range(pool.cursor)) if limits.round_of(key[0]) == 1}
    for iteration, count in pool.rounds.items():
        assert 1 < count <= limits.rounds
        further = [limits.round_positions(iteration, number) for number in range(1, count + 1)]
        begun |= {(position, sample) for own in further for position in own for sample in range(limits.group_size)}
        assert pool.complete.issuperset(p for own in further[:-1] for p in own), "a round waits for those before it"
    trained = set(range(pool.head)) | pool.trained_ahead  # or skipped
    assert len(trained) == controller.version * limits.positions, "each group is trained once"
    places = Counter(pool.again) + Counter(list(pool.running))
    for position, group in pool.groups.items():
        assert position not in trained
        places += Counter((position, sample) for sample in (*group.versions, *group.failed))
    expected = Counter(key for key in begun if key[0] not in trained)
    assert places == expected, "each rollout that has begun is in one place"
    if controller.batch is not None:
        ages = controller.ages(controller.batch)
        assert all(0 <= age <= limits.asynchrony.staleness for age in ages), f"over the bound: {ages}"
        if limits.asynchrony.window == 1:
            first, iteration = controller.version * limits.positions, controller.version + 1
            drawn = limits.groups * pool.rounds_of(iteration)
            assert controller.batch == tuple(range(first, first + drawn)), "an iteration's own groups, of all rounds"
            assert pool.complete.issuperset(controller.batch)
            assert limits.rounds == 1 or iteration in pool.ended, "nothing is trained on between two rounds"
    on_replicas = {key: name for name, place in controller.replicas.items() for key in place.running}
    assert on_replicas == {key: running.replica for key, running in pool.running.items()}
    if limits.asynchrony.mode == "fully-async" and not limits.barrier and limits.validate_every == 0:
        for name, place in controller.replicas.items():
            answer = controller.admission(name)
            served = place.version is not None and controller.transfer(name) is None
            assert not (served and isinstance(answer, Block) and answer.for_weights), (
                "fully-async never waits for weights"
            )


def copy(controller: Controller) -> Controller:
    return restore(controller.terms, snapshot(controller))
