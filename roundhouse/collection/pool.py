"""The trajectory pool between runners, which finish rollouts at any time, and the step, which takes whole groups.

Invariant: each planned rollout is in exactly one place: not begun (at or after `cursor`), to be repeated (`again`),
running, or an outcome of its group. An untrained group leaves only by being trained, whole and once.

    cursor = 5, group size 2:   0/0 0/1 1/0 1/1 2/0 | 2/1 3/0 …
                                begun                 not begun

    begin ──> finish | fail | evict (rolled out again)      batch: the groups that the ready rule allows      train: they leave

Under dynamic sampling an iteration's further rounds begin one by one, each when the earlier ones are complete
(`begin_round`), and before any rollout of a later iteration. The groups are a batch when the rounds have ended. If a
group loses an outcome, its round is decided again, and later rounds are cancelled.

The pool is pure and part of the controller's state. The rollouts are in the collect stages' parts
(`collection.collector`); `collection.runner` compares both after a crash. `StalenessBound` has the numbers of the plan
and of the staleness bound, which docs/asynchrony.md proves: with P groups an iteration, window W and start lag S,
staleness <= S + ceil((W - 1) / P).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from roundhouse.config.rollout import Asynchrony
from roundhouse.errors import ConfigError, DataError
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.trajectories.records import Rollout

Key = tuple[int, int]
"""(position, sample)."""


@dataclass(frozen=True)
class StalenessBound:
    """The plan's numbers and the rules of `Asynchrony`."""

    asynchrony: Asynchrony
    groups: int
    """Number of groups of an iteration."""
    group_size: int
    """Rollouts of a group."""
    iterations: int
    validate_every: int = 0
    """Versions between evaluations, version 0 first; 0 for none."""
    first_version: int = 0
    """First version of the plan; for a fork, its parent's version. Everything before it counts as trained and
    evaluated."""
    evaluates_first: bool = True
    """Whether the plan evaluates `first_version`, rather than an evaluation before the plan."""
    rounds: int = 1
    """Rounds of `groups` groups that an iteration may draw (`rollout.dynamic_sampling.max_rounds`)."""

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "iterations", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; an asynchronous run needs 1 or more.")
        if (unfit := self.asynchrony.unfit_window(self.groups)) is not None:
            raise ConfigError(unfit)
        if self.rounds > 1 and self.chooses:
            raise ConfigError(
                f"rounds is {self.rounds}; with asynchrony.window {self.asynchrony.window} it has to be 1."
            )

    @cached_property
    def start_lag(self) -> int:
        """S above."""
        return self.asynchrony.start_lag(self.groups)

    @cached_property
    def chooses(self) -> bool:
        """Return whether a step may train on groups of other iterations."""
        return self.asynchrony.window > 1

    @cached_property
    def positions(self) -> int:
        """Number of positions of an iteration: the groups of all rounds that it may draw."""
        return self.groups * self.rounds

    @cached_property
    def total(self) -> int:
        """Positions of the whole plan."""
        return self.positions * self.iterations

    @cached_property
    def barrier(self) -> bool:
        """Return whether all replicas must hold the trained version before a rollout starts."""
        return self.asynchrony.staleness == 0

    @cached_property
    def starts_during_transfer(self) -> bool:
        """Return whether a rollout may start, queued in the engine, during its replica's weight transfer."""
        return self.asynchrony.mode == "fully-async" and not self.barrier

    @cached_property
    def drains(self) -> bool:
        """Return whether a replica finishes its rollouts before its weights are replaced."""
        return self.asynchrony.refit == "drain" or self.barrier

    def iteration_of(self, position: int) -> int:
        """The iteration that a group belongs to, from 1."""
        return position // self.positions + 1

    def round_of(self, position: int) -> int:
        """The round of its iteration that a group belongs to, from 1."""
        return position % self.positions // self.groups + 1

    def round_positions(self, iteration: int, number: int) -> range:
        """The groups of a round of an iteration."""
        first = (iteration - 1) * self.positions + (number - 1) * self.groups
        return range(first, first + self.groups)

    def may_begin(self, position: int, version: int) -> bool:
        """Return whether a rollout of this group may start on this version."""
        return self.iteration_of(position) - 1 - version <= self.start_lag

    def due(self, evaluated: int, version: int) -> int | None:
        """The version that is to be evaluated next, if it exists already."""
        if self.validate_every == 0:
            return None
        following = (evaluated // self.validate_every + 1) * self.validate_every
        return following if following <= version else None


class PlannedRollouts:
    """A plan's rollouts, as the controller counts them: positions of groups and numbers of samples."""

    def __init__(self, bound: StalenessBound, specs: Callable[..., Sequence[RolloutSpec]]) -> None:
        self.bound = bound
        self.specs = specs
        """The rollouts of a round of an iteration, the first unless it is named; groups in order, samples in order."""

    def iteration_of(self, position: int) -> int:
        return self.bound.iteration_of(position)

    def groups(self, iteration: int, number: int = 1) -> tuple[int, ...]:
        """The positions of the groups of an iteration's round."""
        return tuple(self.bound.round_positions(iteration, number))

    def samples(self, position: int) -> Iterator[Key]:
        """The rollouts of a group."""
        return ((position, sample) for sample in range(self.bound.group_size))

    def spec(self, key: Key) -> RolloutSpec:
        """The spec of a rollout of the controller's."""
        groups, size = self.bound.groups, self.bound.group_size
        specs = self.specs(self.iteration_of(key[0]), self.bound.round_of(key[0]))
        return specs[key[0] % groups * size + key[1]]

    def keys(self, iteration: int, number: int = 1) -> Iterator[Key]:
        """The rollouts of a round as the controller calls them, in the order of `specs`."""
        for position in self.groups(iteration, number):
            yield from self.samples(position)

    def keyed(self, iteration: int, rollouts: Iterable[Rollout]) -> dict[Key, Rollout]:
        """Return rollouts of an iteration by key; omit rollouts outside the plan."""
        left, by_key = {rollout.rollout_id: rollout for rollout in rollouts}, dict[Key, Rollout]()
        for number in range(1, self.bound.rounds + 1):
            if not left:
                break
            for key, spec in zip(self.keys(iteration, number), self.specs(iteration, number), strict=True):
                if (rollout := left.pop(spec.rollout_id, None)) is not None:
                    by_key[key] = rollout
        return by_key


@dataclass(slots=True)
class Group:
    """A group of which a rollout has begun."""

    versions: dict[int, int] = field(default_factory=dict)
    """Oldest version among the tokens of each finished sample."""
    failed: set[int] = field(default_factory=set)
    """Samples that failed for good."""

    def outcomes(self) -> int:
        return len(self.versions) + len(self.failed)


@dataclass(slots=True)
class RunningRollout:
    """An attempt in a replica's slot."""

    replica: str
    version: int
    """The oldest that its tokens can have."""


class GroupPool:
    """See the module's docstring."""

    def __init__(self, terms: StalenessBound) -> None:
        self.terms = terms
        self.cursor = terms.first_version * terms.positions * terms.group_size
        """The first rollout of a first round that has not begun."""
        self.again: list[Key] = []
        """Heap of rollouts to repeat, or of a further round; oldest group first."""
        self.attempts: dict[Key, int] = {}
        """Attempts begun, of rollouts with more than one, until their group is trained."""
        self.running: dict[Key, RunningRollout] = {}
        self.groups: dict[int, Group] = {}
        """Begun and untrained, by position."""
        self.complete: set[int] = set()
        """Positions of groups in which every rollout has an outcome."""
        self.complete_of: dict[int, int] = {}
        """The same, counted by the iteration they belong to."""
        self.head = terms.first_version * terms.positions
        """The oldest untrained position."""
        self.trained_ahead: set[int] = set()
        """Trained positions above `head`."""
        self.rounds: dict[int, int] = {}
        """Rounds begun, of untrained iterations with more than one."""
        self.ended: set[int] = set()
        """Untrained iterations with only ended rounds, if several rounds are possible."""

    def __contains__(self, key: Key) -> bool:
        """Return whether this rollout is finished and its group untrained."""
        return key[0] in self.groups and key[1] in self.groups[key[0]].versions

    def next(self) -> Key | None:
        """Return the next rollout to start; None at the end of the plan."""
        if self.again:
            return self.again[0]
        if self.cursor == self.terms.total * self.terms.group_size:
            return None
        return divmod(self.cursor, self.terms.group_size)

    def attempt_of(self, key: Key) -> int:
        """Number of the attempt that runs, or ran last."""
        return self.attempts.get(key, 1)

    def begin(self, key: Key, attempt: int, replica: str, version: int) -> None:
        if key != self.next() or attempt != (self.attempts.get(key, 1)):
            raise DataError(f"Attempt {attempt} at rollout {_name(key)} began, but {self.next()} is next. {_TELL}")
        if self.again:
            heapq.heappop(self.again)
        else:
            self._advance()
            if key[0] not in self.groups:
                self.groups[key[0]] = Group()
        self.running[key] = RunningRollout(replica, version)

    def finish(self, key: Key, attempt: int) -> RunningRollout:
        """The attempt's outcome is there."""
        running = self._ended(key, attempt)
        self.groups[key[0]].versions[key[1]] = running.version
        self._count(key[0])
        return running

    def fail(self, key: Key, attempt: int, final: bool) -> RunningRollout:
        """The attempt has failed; unless it was the last, the rollout is begun again."""
        running = self._ended(key, attempt)
        if final:
            self.groups[key[0]].failed.add(key[1])
            self._count(key[0])
        else:
            self._repeat(key)
        return running

    def evict(self, key: Key) -> dict[Key, RunningRollout]:
        """Discard a rollout's outcome or running attempt and schedule it again.

        Returns:
            The rollouts that stopped: this one, or rollouts of later rounds of its iteration, which are cancelled.
        """
        if key in self.running:
            running = self.running.pop(key)
            self._repeat(key)
            return {key: running}
        group = self.groups.get(key[0])
        if group is None or (key[1] not in group.versions and key[1] not in group.failed):
            raise DataError(f"Rollout {_name(key)} cannot be evicted: it is not in the pool. {_TELL}")
        self._uncount(key[0])
        group.versions.pop(key[1], None)
        group.failed.discard(key[1])
        self._repeat(key)
        return self._close_rounds(key[0])

    def abandon(self, key: Key) -> None:
        """Its replica is gone or has lost its weights."""
        del self.running[key]
        self._repeat(key)

    def adopt(self, key: Key, version: int | None) -> None:
        """Count a stored rollout without an event as finished, or without a version as failed. A rollout of a round
        that has not begun counts when the round begins."""
        if self.terms.round_of(key[0]) > self.rounds_of(self.terms.iteration_of(key[0])):
            return
        index = key[0] * self.terms.group_size + key[1]
        while self.cursor <= index:
            cursor = divmod(self.cursor, self.terms.group_size)
            self.groups.setdefault(cursor[0], Group())
            heapq.heappush(self.again, cursor)
            self._advance()
        group = self.groups.get(key[0])
        if key not in self.again or group is None:
            return  # its event was not lost after all
        self.again.remove(key)
        heapq.heapify(self.again)
        if version is None:
            group.failed.add(key[1])
        else:
            group.versions[key[1]] = version
        self._count(key[0])

    def rounds_of(self, iteration: int) -> int:
        """Return the number of started or startable rounds of an untrained iteration; the first round needs no
        decision."""
        return self.rounds.get(iteration, 1)

    def awaits_round(self, iteration: int) -> bool:
        """Return whether all started rounds are complete and the decision about another one is open."""
        if self.terms.rounds == 1 or iteration in self.ended:
            return False
        return self.complete_of.get(iteration, 0) == self.terms.groups * self.rounds_of(iteration)

    def begin_round(self, iteration: int, number: int) -> None:
        """The groups of a further round are to be begun."""
        if not self.awaits_round(iteration) or number != self.rounds_of(iteration) + 1 or number > self.terms.rounds:
            raise DataError(f"Round {number} of iteration {iteration} began, {self._rounds(iteration)}. {_TELL}")
        self.rounds[iteration] = number
        for position in self.terms.round_positions(iteration, number):
            self.groups[position] = Group()
            for sample in range(self.terms.group_size):
                heapq.heappush(self.again, (position, sample))

    def end_rounds(self, iteration: int, rounds: int) -> None:
        """End the rounds of an iteration: its groups are complete."""
        if not self.awaits_round(iteration) or rounds != self.rounds_of(iteration):
            raise DataError(f"Iteration {iteration} ended with round {rounds}, {self._rounds(iteration)}. {_TELL}")
        self.ended.add(iteration)

    def train(self, positions: tuple[int, ...]) -> None:
        """These groups have been trained on."""
        for position in positions:
            self._uncount(position)
            del self.groups[position]
        self._leave(positions if self.terms.chooses else self.oldest())

    def _leave(self, positions: tuple[int, ...]) -> None:
        self.trained_ahead.update(positions)
        while self.head in self.trained_ahead:
            self.trained_ahead.discard(self.head)
            self.head += 1
        self.complete_of = {iteration: count for iteration, count in self.complete_of.items() if count}
        self.attempts = {key: count for key, count in self.attempts.items() if not self.has_left(key[0])}
        first = self.terms.iteration_of(self.head)
        self.rounds = {iteration: count for iteration, count in self.rounds.items() if iteration >= first}
        self.ended = {iteration for iteration in self.ended if iteration >= first}

    def has_left(self, position: int) -> bool:
        """Return whether this group was trained on or dropped."""
        return position < self.head or position in self.trained_ahead

    def oldest(self) -> tuple[int, ...]:
        """The positions of the oldest untrained groups, as many as a step trains on, of all rounds that it may draw."""
        positions: list[int] = []
        position = self.head
        while len(positions) < self.terms.positions:
            if not self.has_left(position):
                positions.append(position)
            position += 1
        return tuple(positions)

    def drop(self, positions: tuple[int, ...]) -> None:
        """These groups will not be trained on, whatever has become of them: the oldest ones, or complete ones."""
        dropped = set(positions)
        self.cursor = max(self.cursor, (max(positions) + 1) * self.terms.group_size)
        self.again = [key for key in self.again if key[0] not in dropped]
        heapq.heapify(self.again)
        self.running = {key: running for key, running in self.running.items() if key[0] not in dropped}
        for position in positions:
            self._uncount(position)
            self.groups.pop(position, None)
        self._leave(positions)

    def batch(self) -> tuple[int, ...] | None:
        """Return the positions that the next step trains on; None while the batch is not ready.

        Candidates are the untrained groups in the window. With `asynchrony.ready: batch_size_reached`, a step's number
        of them must be complete. With `loaded_batch_finished`, all started ones must be complete too, so that slow
        groups are not passed over.
        """
        size, asynchrony = self.terms.groups, self.terms.asynchrony
        if len(self.complete) < size:
            return None
        if asynchrony.window == 1:
            iteration = self.terms.iteration_of(self.head)
            drawn = size * self.rounds_of(iteration)
            ends = self.terms.rounds == 1 or iteration in self.ended
            own = ends and self.complete_of.get(iteration, 0) == drawn
            return tuple(range(self.head, self.head + drawn)) if own else None
        candidates: list[int] = []
        position = self.head
        while position < self.terms.total and (position < self.head + asynchrony.window or len(candidates) < size):
            if not self.has_left(position):
                candidates.append(position)
            position += 1
        if asynchrony.ready == "loaded_batch_finished" and any(
            position in self.groups and position not in self.complete for position in candidates
        ):
            return None
        ready = [position for position in candidates if position in self.complete][:size]
        return tuple(ready) if len(ready) == size else None

    def _ended(self, key: Key, attempt: int) -> RunningRollout:
        if key not in self.running or attempt != self.attempt_of(key):
            raise DataError(f"Attempt {attempt} at rollout {_name(key)} ended, but it does not run. {_TELL}")
        return self.running.pop(key)

    def _advance(self) -> None:
        """Move `cursor` on, from the last rollout of a first round to the next iteration's."""
        first, whole = (count * self.terms.group_size for count in (self.terms.groups, self.terms.positions))
        self.cursor += 1
        if self.cursor % whole == first:
            self.cursor += whole - first

    def _close_rounds(self, position: int) -> dict[Key, RunningRollout]:
        """Rounds after that of this group have not begun any more. Returns what ran of them."""
        iteration, number = self.terms.iteration_of(position), self.terms.round_of(position)
        self.ended.discard(iteration)
        if self.rounds_of(iteration) == number:
            return {}
        closed = range(self.terms.round_positions(iteration, number).stop, iteration * self.terms.positions)
        stopped = {key: running for key, running in self.running.items() if key[0] in closed}
        for key in stopped:
            del self.running[key]
            self.attempts[key] = self.attempt_of(key) + 1
        for other in closed:
            self._uncount(other)
            self.groups.pop(other, None)
        self.again = [key for key in self.again if key[0] not in closed]
        heapq.heapify(self.again)
        if number == 1:
            del self.rounds[iteration]
        else:
            self.rounds[iteration] = number
        return stopped

    def _rounds(self, iteration: int) -> str:
        settled = "has no open decision" if not self.awaits_round(iteration) else "may draw another round"
        return f"but it has begun {self.rounds_of(iteration)} of {self.terms.rounds} and {settled}"

    def _repeat(self, key: Key) -> None:
        self.attempts[key] = self.attempt_of(key) + 1
        heapq.heappush(self.again, key)

    def _count(self, position: int) -> None:
        if self.groups[position].outcomes() == self.terms.group_size:
            self.complete.add(position)
            iteration = self.terms.iteration_of(position)
            self.complete_of[iteration] = self.complete_of.get(iteration, 0) + 1

    def _uncount(self, position: int) -> None:
        if position in self.complete:
            self.complete.discard(position)
            self.complete_of[self.terms.iteration_of(position)] -= 1


_TELL = "It is stale or a duplicate. Drop it."


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"
