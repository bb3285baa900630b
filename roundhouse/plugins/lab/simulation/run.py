"""A run in virtual time: an event queue around the real controller with its pool.

Invariant: the controller receives only the events of a real run, and batches are judged by the versions that the
simulated engine recorded, not by the controller's plan; a batch over the bound, or an incomplete one, ends the
simulation with an error. Time passes only between events; nothing sleeps.

A simulated replica generates nothing and takes as long as a real one: all rollouts in its slots advance alike, one unit
of work in `step + step_per_rollout * running` seconds, and not at all while it is paused. One clock of attained work
therefore serves them all, and the rollout with the least work left ends next.

    step 0.01, per rollout 0.001: with 10 rollouts a token takes 0.02 s, with 100 of them 0.11 s

Random numbers are drawn in blocks; each purpose has a separate stream, so that one does not shift another.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roundhouse.collection import controller as happened
from roundhouse.collection.controller import Continue, Controller, Event
from roundhouse.collection.pool import Key, StalenessBound
from roundhouse.errors import DataError
from roundhouse.plugins.lab.simulation.scenario import (
    Constant,
    Distribution,
    EngineScenario,
    LogNormal,
    RecordedIterations,
    RolloutDistribution,
    Scenario,
)

Happening = Callable[..., list[str] | None]
"""Lets something happen; returns the replicas that are to be looked at again, None when it did not happen after all."""


@dataclass
class SimulationResult:
    """Result of a simulated run."""

    seconds: float
    iterations: int
    trainer_busy_seconds: float
    slot_seconds: float
    """Slots times the time that their replicas were there."""
    busy_slot_seconds: float
    paused_slot_seconds: float
    discarded_slot_seconds: float
    """Spent on attempts that were not trained on."""
    discarded: Counter[str]
    """Attempts that were not trained on, by reason."""
    ages: Counter[int]
    """Rollouts trained on, by age at their oldest token."""
    failed: int
    """Rollouts on record as failed."""
    ended_at: list[float] = field(default_factory=list)
    """When each version was there."""
    journal: list[Event] = field(default_factory=list)

    @property
    def iterations_per_hour(self) -> float:
        return 3600 * self.iterations / self.seconds

    @property
    def trainer_wait(self) -> float:
        return 1 - self.trainer_busy_seconds / self.seconds

    @property
    def engine_idle(self) -> float:
        """Share of slot time in which nothing was generated."""
        return 1 - self.busy_slot_seconds / self.slot_seconds if self.slot_seconds else 0.0

    @property
    def mean_age(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / max(1, self.ages.total())

    @property
    def discarded_share(self) -> float:
        spent = self.busy_slot_seconds + self.paused_slot_seconds
        return self.discarded_slot_seconds / spent if spent else 0.0


class Simulation:
    """See the module's docstring."""

    def __init__(self, scenario: Scenario, *, keep_journal: bool = False) -> None:
        self.scenario = scenario
        self.terms = StalenessBound(
            scenario.asynchrony, scenario.groups, scenario.group_size, scenario.iterations, scenario.evaluate_every
        )
        engine = scenario.engine
        names = [f"replica-{number:04d}" for number in range(engine.replicas)]
        self.controller = Controller(self.terms, names)
        self._finished: dict[Key, int] = {}
        """Untrained rollouts, with the oldest version that the simulated engine recorded for them."""
        self.replicas = {name: SimulatedReplica(name, engine) for name in names}
        lengths, refit, train, faults, losses = np.random.default_rng(scenario.seed).spawn(5)
        self._lengths = draw_rollouts(
            scenario.rollout, lengths, scenario.iterations, scenario.groups * scenario.group_size
        ).tolist()
        self._refit = stream(engine.refit_seconds, refit)
        self._train = stream(scenario.trainer.seconds, train)
        self._faults = uniform(faults)
        self._losses = losses
        self.now = 0.0
        self._queue: list[tuple[float, int, Happening, tuple[Any, ...]]] = []
        self._count = 0
        self._hungry = dict.fromkeys(names)
        """Replicas with a free slot that have to wait, in order."""
        self._born = dict.fromkeys(names, 0.0)
        """When each replica came."""
        self._foreseen: dict[str, int] = {}
        """Serial number of the last prediction for each replica."""
        self._keep_journal = keep_journal
        self.outcome = SimulationResult(0.0, scenario.iterations, 0.0, 0.0, 0.0, 0.0, 0.0, Counter(), Counter(), 0)

    def run(self) -> SimulationResult:
        """Simulate until the last version is in the store.

        Raises:
            DataError: the controller broke a promise. It is a defect of it.
        """
        for name in self.replicas:
            self._foresee_loss(name)
        self._settle(list(self.replicas))
        while not self.controller.finished:
            if not self._queue:
                raise DataError(f"Nothing can happen any more at version {self.controller.version}: a deadlock.")
            self.now, _, happens, subject = heapq.heappop(self._queue)
            if (changed := happens(*subject)) is not None:
                self._settle(changed)
        self.outcome.seconds = self.now
        for replica in self.replicas.values():
            replica.next_end(self.now)  # brings its account up to date
            self._account(replica)
        return self.outcome

    # Events

    def _on_end(self, name: str, life: int, serial: int) -> list[str] | None:
        replica = self.replicas.get(name)
        if replica is None or (replica.life, self._foreseen[name]) != (life, serial):
            return None  # something else happened to it meanwhile
        key, slot = replica.end(self.now)
        if next(self._faults) < self.scenario.faults.rollout:
            final = slot.attempt >= self.scenario.faults.attempts
            self.outcome.discarded["failed"] += 1
            self.outcome.discarded_slot_seconds += self.now - slot.began
            self.outcome.failed += final
            self._tell(happened.RolloutFailed(*key, slot.attempt, "planted", final))
        elif key in self._finished:
            raise DataError(f"Rollout {key} has finished twice.")
        else:
            self._finished[key] = min(slot.versions)
            self._tell(happened.RolloutFinished(*key, slot.attempt))
        return [name]

    def _on_training_ended(self, failed: bool) -> list[str]:
        version = self.controller.version + 1
        if failed:
            self._tell(happened.TrainingFailed(version, "planted"))
            return []
        self._tell(happened.TrainingFinished(version))
        self.outcome.ended_at.append(self.now)
        return list(self.replicas)

    def _on_transferred(self, name: str, life: int, version: int) -> list[str] | None:
        replica = self.replicas.get(name)
        if replica is None or replica.life != life:
            return None
        if next(self._faults) < self.scenario.faults.transfer:
            self._clear(replica, "transfer failed")
            self._tell(happened.TransferFailed(name, "planted"))
        else:
            replica.resume(self.now, version)
            self._tell(happened.TransferFinished(name, version))
        return [*self._hungry, name] if self.terms.barrier else [name]

    def _on_evaluated(self, version: int) -> list[str]:
        self._tell(happened.ValidationEnded(version))
        return list(self.replicas)

    def _on_lost(self, name: str) -> list[str]:
        replica = self.replicas.pop(name)
        self._clear(replica, "replica lost")
        self._account(replica)
        self._hungry.pop(name, None)
        self._tell(happened.ReplicaLost(name, "planted"))
        self._later(self.scenario.faults.replica_return_seconds, self._on_joined, name, replica.life)
        return list(self._hungry)

    def _on_joined(self, name: str, life: int) -> list[str]:
        self.replicas[name] = SimulatedReplica(name, self.scenario.engine, life=life, _clock=self.now)
        self._born[name] = self.now
        self._tell(happened.ReplicaJoined(name))
        self._foresee_loss(name)
        return [name]

    # Reactions

    def _settle(self, changed: list[str]) -> None:
        """Carry out every decision that the last event led to."""
        self._start_training()
        if (validate := self.controller.validation()) is not None:
            self._tell(happened.ValidationStarted(validate.version))
            self._later(self.scenario.evaluation_seconds, self._on_evaluated, validate.version)
        for name in changed:
            if name in self.replicas and (transfer := self.controller.transfer(name)) is not None:
                replica = self.replicas[name]
                replica.pause(self.now)
                self._tell(happened.TransferStarted(name, transfer.version))
                self._later(next(self._refit), self._on_transferred, name, replica.life, transfer.version)
        for name in dict.fromkeys([*changed, *self._hungry]) if self.controller.pool.again else changed:
            self._fill(name)

    def _start_training(self) -> None:
        """Start the training that the controller decides on; its batch is whole and within the bound."""
        train = self.controller.training()
        if train is None:
            return
        self._tell(happened.TrainingStarted(train.iteration, train.groups))
        seconds = next(self._train)
        self.outcome.trainer_busy_seconds += seconds
        failed = next(self._faults) < self.scenario.faults.training
        self._later(seconds, self._on_training_ended, failed)
        if failed:
            return
        scenario, iteration = self.scenario, train.iteration
        keys = [(position, sample) for position in train.groups for sample in range(scenario.group_size)]
        ages = Counter(iteration - 1 - self._finished.pop(key) for key in keys if key in self._finished)
        if ages and not 0 <= min(ages) <= max(ages) <= scenario.asynchrony.staleness:
            raise DataError(
                f"Iteration {iteration} would train on ages {dict(ages)}, over {scenario.asynchrony.staleness}."
            )
        lost = sum(len(self.controller.pool.groups[position].failed) for position in train.groups)
        if ages.total() + lost != len(keys):
            raise DataError(f"The batch of iteration {iteration} has {ages.total()} rollouts and {lost} failed ones.")
        self.outcome.ages += ages

    def _fill(self, name: str) -> None:
        replica = self.replicas.get(name)
        if replica is None:
            return
        self._hungry.pop(name, None)
        for _ in range(replica.free):
            answer = self.controller.admission(name)
            if not isinstance(answer, Continue):
                self._hungry[name] = None
                break
            key = (answer.position, answer.sample)
            self._tell(happened.RolloutStarted(*key, answer.attempt, name))
            replica.begin(self.now, key, answer.attempt, self._lengths[key[0] * self.scenario.group_size + key[1]])
        self._foreseen[name] = self._foreseen.get(name, 0) + 1
        if (end := replica.next_end(self.now)) is not None:
            self._later(end - self.now, self._on_end, name, replica.life, self._foreseen[name])

    def _clear(self, replica: SimulatedReplica, reason: str) -> None:
        self.outcome.discarded[reason] += len(replica.slots)
        self.outcome.discarded_slot_seconds += replica.clear(self.now)

    def _foresee_loss(self, name: str) -> None:
        if (hours := self.scenario.faults.replica_hours) is not None:
            self._later(float(self._losses.exponential(3600 * hours)), self._on_lost, name)

    def _tell(self, event: Event) -> None:
        self.controller.apply(event)
        if self._keep_journal:
            self.outcome.journal.append(event)

    def _later(self, seconds: float, happens: Happening, *subject: Any) -> None:
        self._count += 1  # of equal times, the first foreseen is first
        heapq.heappush(self._queue, (self.now + seconds, self._count, happens, subject))

    def _account(self, replica: SimulatedReplica) -> None:
        outcome = self.outcome
        outcome.slot_seconds += self.scenario.engine.slots * (self.now - self._born[replica.name])
        outcome.busy_slot_seconds += replica.busy_seconds
        outcome.paused_slot_seconds += replica.paused_seconds


def simulate(scenario: Scenario, *, keep_journal: bool = False) -> SimulationResult:
    """The outcome of a scenario."""
    return Simulation(scenario, keep_journal=keep_journal).run()


@dataclass(slots=True)
class Slot:
    """A running rollout."""

    attempt: int
    versions: list[int]
    """Policy versions that generated, oldest first, as an engine would report them."""
    began: float
    """Seconds since the run began."""


@dataclass(slots=True)
class SimulatedReplica:
    """See the module's docstring."""

    name: str
    scenario: EngineScenario
    version: int | None = None
    paused: bool = False
    life: int = 0
    """Changes whenever predictions about it become void."""
    slots: dict[Key, Slot] = field(default_factory=dict)
    busy_seconds: float = 0.0
    """Slot-seconds in which a rollout ran."""
    paused_seconds: float = 0.0
    """Slot-seconds in which a rollout was held by a transfer."""
    _clock: float = 0.0
    """When `_work` was brought up to date."""
    _work: float = 0.0
    """Units that a rollout has got which is here since the beginning."""
    _ends: list[tuple[float, Key, int]] = field(default_factory=list)
    """(work at its end, rollout, attempt), a heap."""

    @property
    def free(self) -> int:
        return self.scenario.slots - len(self.slots)

    def begin(self, now: float, key: Key, attempt: int, work: float) -> None:
        self._advance(now)
        version = [self.version] if self.version is not None and not self.paused else []
        self.slots[key] = Slot(attempt, version, now)
        heapq.heappush(self._ends, (self._work + self.scenario.prefill_work + work, key, attempt))

    def next_end(self, now: float) -> float | None:
        """When the next rollout ends if nothing changes."""
        if self.paused or not self._ends:
            return None
        self._advance(now)
        return now + max(0.0, self._ends[0][0] - self._work) * self._step()

    def end(self, now: float) -> tuple[Key, Slot]:
        """The rollout that ends now."""
        self._advance(now)
        _, key, _ = heapq.heappop(self._ends)
        return key, self.slots.pop(key)

    def pause(self, now: float) -> None:
        self._advance(now)
        self.paused = True

    def resume(self, now: float, version: int) -> None:
        """Resume with other weights."""
        self._advance(now)
        self.paused, self.version = False, version
        for slot in self.slots.values():
            slot.versions.append(version)

    def clear(self, now: float) -> float:
        """Lose weights and rollouts; return the slot-seconds that these had taken."""
        self._advance(now)
        lost = sum(now - slot.began for slot in self.slots.values())
        self.slots.clear()
        self._ends.clear()
        self.paused, self.version, self.life = False, None, self.life + 1
        return lost

    def _step(self) -> float:
        return self.scenario.step_seconds + self.scenario.step_seconds_per_rollout * len(self.slots)

    def _advance(self, now: float) -> None:
        passed, running = now - self._clock, len(self.slots)
        if passed > 0 and running:
            if self.paused:
                self.paused_seconds += passed * running
            else:
                self.busy_seconds += passed * running
                self._work += passed / self._step()
        self._clock = now


_BLOCK = 4096


def draw(distribution: Distribution, generator: np.random.Generator, count: int) -> np.ndarray:
    """`count` values."""
    if isinstance(distribution, Constant):
        return np.full(count, distribution.value)
    if isinstance(distribution, LogNormal):
        values = distribution.median * np.exp(distribution.sigma * generator.standard_normal(count))
        return values if distribution.limit is None else np.minimum(values, distribution.limit)
    return np.asarray(distribution.values)[_in_turn(generator, len(distribution.values), count)]


def draw_rollouts(
    distribution: RolloutDistribution, generator: np.random.Generator, iterations: int, count: int
) -> np.ndarray:
    """`count` values for each of `iterations`, one after the other."""
    if not isinstance(distribution, RecordedIterations):
        return draw(distribution, generator, iterations * count)
    drawn = []
    for chosen in _in_turn(generator, len(distribution.iterations), iterations):
        values = np.asarray(distribution.iterations[chosen])
        # as many as were recorded are exactly those, as they began: which of them is last decides how long all take
        whole = count == len(values)
        drawn.append(values if whole else generator.choice(values, count, replace=count > len(values)))
    return np.concatenate(drawn)


def _in_turn(generator: np.random.Generator, of: int, count: int) -> np.ndarray:
    """`count` numbers below `of` at random, each of them once before any comes again."""
    return np.concatenate([generator.permutation(of) for _ in range(-(-count // of))])[:count]


def stream(distribution: Distribution, generator: np.random.Generator) -> Iterator[float]:
    """Values without end."""
    while True:
        yield from draw(distribution, generator, _BLOCK).tolist()


def uniform(generator: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1) without end."""
    while True:
        yield from generator.random(_BLOCK).tolist()
