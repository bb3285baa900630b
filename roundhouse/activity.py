"""What is in flight in this process, since when, and when it last moved.

Invariant: work that was started and has not ended is in flight, and ended work leaves nothing behind. Starting, advancing or
ending work is progress of that work and of everything that it is part of, so a stage that still finishes model calls moves.

    collect 3 ──┬── rollout g1/0 ── model call http://…    oldest; moved 4 s ago
                └── rollout g1/1 ── environment calculator

Work begun inside the block of other work (also in its coroutines, and in threads that take over its context) is part of it.

Stages report progress by `announce`, as log records of one logger; what shows them adds a handler to the logger
`roundhouse.progress` and reads the record's `event` and `facts`. Nobody listening costs nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work in flight, as it was when it was asked for."""

    token: str
    module: str
    """Who does it: collect, engine, environment, train, …"""
    kind: str
    """What it is: rollout, model call, update 3 of 8, …"""
    about: str
    """What it is for, such as a rollout's id."""
    where: str
    """URL or server that is waited for, where there is one."""
    seconds: float
    """Since it began."""
    silent_seconds: float
    """Since it, or a part of it, last moved."""

    def __str__(self) -> str:
        about = f" {self.about}" if self.about else ""
        where = f" at {self.where}" if self.where else ""
        return f"{self.module}: {self.kind}{about}{where}, {self.seconds:.1f} s, silent for {self.silent_seconds:.1f} s"


@dataclass(slots=True)
class _Begun:
    module: str
    kind: str
    about: str
    where: str
    parent: str | None
    patience: float
    began: float
    moved: float


_within: ContextVar[str | None] = ContextVar("roundhouse_work", default=None)


class Activity:
    """The work of one process; safe to use from any thread. `clock` gives seconds that never run backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[str, _Begun] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()

    def start(self, module: str, kind: str, about: str = "", where: str = "", patience: float = 0.0) -> str:
        """Begin work, as a part of the work that this context is in; returns its token.

        Args:
            patience: seconds for which it may well be silent, since it has a time limit of its own.
        """
        now, parent = self._clock(), _within.get()
        token = f"{module}-{next(self._numbers)}"
        with self._changed:
            self._begun[token] = _Begun(module, kind, about, where, parent, patience, now, now)
            self._move(parent, now)
        return token

    def advance(self, token: str | None = None) -> None:
        """Say that this work (by default the context's own) has moved."""
        with self._changed:
            self._move(_within.get() if token is None else token, self._clock())

    def end(self, token: str) -> None:
        """End work; ending it twice does nothing."""
        with self._changed:
            begun = self._begun.pop(token, None)
            if begun is not None:
                self._move(begun.parent, self._clock())
                self._changed.notify_all()

    @contextmanager
    def track(self, module: str, kind: str, about: str = "", where: str = "", patience: float = 0.0) -> Iterator[str]:
        """The work of a block; arguments as of `start`."""
        token = self.start(module, kind, about, where, patience)
        outer = _within.set(token)
        try:
            yield token
        finally:
            _within.reset(outer)
            self.end(token)

    def in_flight(self, within: str | None = None) -> list[Work]:
        """What is in flight, oldest first; `within` asks for the parts of one piece of work only."""
        with self._changed:
            now = self._clock()
            chosen = [
                (token, begun) for token, begun in self._begun.items() if within is None or self._is_in(token, within)
            ]
        return [
            Work(token, b.module, b.kind, b.about, b.where, now - b.began, now - b.moved)
            for token, b in sorted(chosen, key=lambda item: item[1].began)
        ]

    def silent_seconds(self, token: str) -> float:
        """How long neither this work nor a part of it has moved; 0 when it has ended."""
        with self._changed:
            begun = self._begun.get(token)
            return 0.0 if begun is None else self._clock() - begun.moved

    def is_stalled(self, token: str, limit: float) -> bool:
        """Whether this work has not moved for `limit` seconds, and no part of it is within its patience."""
        with self._changed:
            begun, now = self._begun.get(token), self._clock()
            if begun is None or now - begun.moved <= limit:
                return False
            parts = [part for name, part in self._begun.items() if part.patience and self._is_in(name, token)]
            return all(now - part.moved > part.patience for part in parts)

    def around(self) -> list[Work]:
        """The work that this context is in, outermost first."""
        found, token = [], _within.get()
        with self._changed:
            now = self._clock()
            while token is not None and (b := self._begun.get(token)) is not None:
                found.append(Work(token, b.module, b.kind, b.about, b.where, now - b.began, now - b.moved))
                token = b.parent
        return found[::-1]

    def is_quiescent(self, module: str | None = None) -> bool:
        """Whether nothing is in flight (in one module)."""
        with self._changed:
            return self._is_quiescent(module)

    def wait_quiescent(self, timeout: float, module: str | None = None) -> bool:
        """Wait until nothing is in flight (in one module), at most `timeout` seconds; whether that came about."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_quiescent(module), timeout)

    def summary(self, within: str | None = None) -> str:
        """One line a kind of work: how many, and the oldest of them."""
        works = self.in_flight(within)
        counts = Counter((work.module, work.kind) for work in works)
        oldest = {(work.module, work.kind): work for work in reversed(works)}
        lines = [f"{count} in flight, the oldest: {oldest[key]}" for key, count in counts.items()]
        return "\n".join(lines) if lines else "nothing in flight"

    def gauges(self) -> dict[str, float]:
        """Numbers for a plot: how much is in flight by module, and the age of the oldest."""
        values: dict[str, float] = {}
        for work in self.in_flight():
            count, age = f"activity/{work.module}_in_flight", f"activity/{work.module}_oldest_seconds"
            values[count] = values.get(count, 0.0) + 1
            values[age] = max(values.get(age, 0.0), work.seconds)
        return values

    def _is_quiescent(self, module: str | None) -> bool:
        return not any(module is None or begun.module == module for begun in self._begun.values())

    def _is_in(self, token: str, within: str) -> bool:
        found: str | None = token
        while found is not None and found != within:
            begun = self._begun.get(found)
            found = None if begun is None else begun.parent
        return found is not None

    def _move(self, token: str | None, now: float) -> None:
        while token is not None and (begun := self._begun.get(token)) is not None:
            begun.moved = now
            token = begun.parent


ACTIVITY = Activity()
"""The activity of this process, as it has one root logger."""


logger = logging.getLogger("roundhouse.progress")
logger.setLevel(logging.INFO)


def announce(event: str, **facts: Any) -> None:
    """Publish an event: `warm_start`, `engine`, `collect`, `iteration`, `evaluation`, … with its facts. It is also a sign of
    life of the stage that it comes from."""
    ACTIVITY.advance()
    logger.info(event, extra={"event": event, "facts": facts})
