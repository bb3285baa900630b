"""The trajectory pool: between runners that finish rollouts at any time and a step that takes whole groups.

Invariant: each rollout of the plan is in exactly one place: not begun (at or after `cursor`), to be repeated (`again`),
running, or an outcome of its group; and an untrained group leaves only by being trained, whole, once.

    cursor = 5, group size 2:   0/0 0/1 1/0 1/1 2/0 | 2/1 3/0 …
                                begun                 not begun

    begin ──> finish | fail | evict (rolled out again)      batch: the groups that the ready rule allows      train: they leave

Under dynamic sampling an iteration's further rounds begin one by one, each when those before it are complete (`begin_round`);
its rollouts then are among those to begin, before any of a later iteration. The iteration's groups are a batch when its rounds
have ended. A round whose group loses an outcome is decided on again: later rounds have not begun then.

Pure, part of the controller's state. The rollouts themselves are in the parts of the collect stages (`collection.collector`),
which a pool that comes out of a crash is compared with (`collection.dispatch`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from roundhouse.collection.bound import Key, StalenessBound
from roundhouse.errors import DataError


@dataclass(slots=True)
class Group:
    """A group of which a rollout has begun."""

    versions: dict[int, int] = field(default_factory=dict)
    """Of each finished sample, the oldest version of its tokens."""
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
        """A heap: what is to be begun again, or in a further round, oldest group first."""
        self.attempts: dict[Key, int] = {}
        """Attempts begun, of rollouts with more than one, until their group is trained."""
        self.running: dict[Key, RunningRollout] = {}
        self.groups: dict[int, Group] = {}
        """Begun and untrained, by position."""
        self.complete: set[int] = set()
        """Positions of groups whose every rollout has an outcome."""
        self.complete_of: dict[int, int] = {}
        """The same, counted by the iteration they belong to."""
        self.head = terms.first_version * terms.positions
        """The oldest untrained position."""
        self.trained_ahead: set[int] = set()
        """Trained positions above `head`."""
        self.rounds: dict[int, int] = {}
        """Rounds begun, of untrained iterations with more than one."""
        self.ended: set[int] = set()
        """Untrained iterations that draw no further round, where more than one may be drawn."""

    def __contains__(self, key: Key) -> bool:
        """Whether this rollout is finished, and its group untrained."""
        return key[0] in self.groups and key[1] in self.groups[key[0]].versions

    def next(self) -> Key | None:
        """What begins next; None at the plan's end."""
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
        """Forget what a rollout brought, or is bringing, and begin it again. Returns what does not run any more: it, or
        rollouts of later rounds of its iteration, which have not begun then."""
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
        """Count a rollout as finished, or without a version as failed, that is in the store although no event told of it. One
        of a round that has not begun counts when that begins."""
        if self.terms.round_of(key[0]) > self.rounds_of(self.terms.iteration_of(key[0])):
            return
        index = key[0] * self.terms.group_size + key[1]
        while self.cursor <= index:
            begun = divmod(self.cursor, self.terms.group_size)
            self.groups.setdefault(begun[0], Group())
            heapq.heappush(self.again, begun)
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
        """How many rounds of an untrained iteration have begun, or may: the first needs no decision."""
        return self.rounds.get(iteration, 1)

    def awaits_round(self, iteration: int) -> bool:
        """Whether every round that has begun is complete, and it is open whether there is another one."""
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
        """There is no further round: the iteration's groups are complete."""
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
        """Whether this group was trained on or dropped."""
        return position < self.head or position in self.trained_ahead

    def oldest(self) -> tuple[int, ...]:
        """The positions of the oldest untrained groups, as many as a step trains on, of all rounds that it may draw."""
        found: list[int] = []
        position = self.head
        while len(found) < self.terms.positions:
            if not self.has_left(position):
                found.append(position)
            position += 1
        return tuple(found)

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
        """The positions that the next step trains on; None while it is not ready.

        Candidates are the untrained groups in the window (`bound`). `asynchrony.ready` is batch_size_reached: as
        many of them as a step trains on are complete. loaded_batch_finished: so is every one that has begun, so that none is
        passed over for being slow.
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


_TELL = "It is the word of an attempt that was given up, or told twice: drop it."


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"
