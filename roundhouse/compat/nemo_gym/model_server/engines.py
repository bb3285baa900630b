"""Which engine a session's next call goes to: a pure state machine, without clock, network or tasks.

Invariant: a session stays with its engine for as long as that engine is in, since that is where its prefix is cached; an engine
that failed is out for a time that doubles with each failure up to a limit, and its sessions move on with their next call; an
engine that answers is in, with nothing held against it.

              unreachable, 429, 502, 503, 504 (at once)
              500, broken connection, time-out (the third in a row)
        in  ───────────────────────────────────────────────────────>  out for 0.5, 1, 2, … 30 s
         ^                                                                 │
         └──────── the time is over, or (but for doubts) it passes a health check

New sessions go to the engine with the fewest calls in flight, among equals to the one with the fewest sessions so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

FIRST_OUT_SECONDS = 0.5
LONGEST_OUT_SECONDS = 30.0
DOUBTS = 3
"""Doubtful failures in a row that take an engine out: fewer may come from one request that no engine survives."""


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine."""

    url: str
    in_flight: int = 0
    sessions: int = 0
    """Sessions ever given to it."""
    failures: int = 0
    """Times in a row that it was taken out."""
    doubts: int = 0
    distrusted: bool = False
    """It went out by doubts: only time brings it back, since it looks healthy."""
    out_until: float = 0.0
    last_error: str = ""

    def is_in(self, now: float) -> bool:
        return self.out_until <= now


class EngineChoice:
    """The engines of a model server and the sessions they serve."""

    def __init__(self, urls: Sequence[str], max_sessions: int) -> None:
        self.engines = [EngineState(url) for url in urls]
        self._max_sessions = max_sessions
        self._session: OrderedDict[str, EngineState] = OrderedDict()

    def choose(self, session: str, now: float, tried: Collection[EngineState] = ()) -> EngineState | None:
        """The session's engine, or another one if that is out; None while all are out.

        Args:
            tried: engines that have just failed this request; they are chosen only where no other is in.
        """
        held = self._session.get(session)
        if held is not None and held.is_in(now) and held not in tried:
            self._session.move_to_end(session)
            return held
        ready = [engine for engine in self.engines if engine.is_in(now)]
        ready = [engine for engine in ready if engine not in tried] or ready
        if not ready:
            return None
        engine = min(ready, key=lambda engine: (engine.in_flight, engine.sessions))
        self._hold(session, engine)
        return engine

    def _hold(self, session: str, engine: EngineState) -> None:
        engine.sessions += self._session.get(session) is not engine
        self._session[session] = engine
        self._session.move_to_end(session)
        if len(self._session) > self._max_sessions:
            self._session.popitem(last=False)

    def next_return(self) -> float:
        """When the first engine that is out comes back."""
        return min(engine.out_until for engine in self.engines)

    @staticmethod
    def answered(engine: EngineState) -> None:
        """It answered a call: nothing is held against it."""
        engine.failures = engine.doubts = 0
        engine.out_until, engine.last_error, engine.distrusted = 0.0, "", False

    @staticmethod
    def failed(engine: EngineState, now: float, error: str) -> None:
        """It cannot serve. Calls that fail together count once: they met the same failure."""
        engine.last_error = error
        if not engine.is_in(now):
            return
        engine.out_until = now + min(FIRST_OUT_SECONDS * 2**engine.failures, LONGEST_OUT_SECONDS)
        engine.failures = min(engine.failures + 1, 30)
        engine.doubts, engine.distrusted = 0, False

    def doubted(self, engine: EngineState, now: float, error: str) -> None:
        """It failed a call in a way that may be the call's own fault."""
        engine.doubts += 1
        if engine.doubts >= DOUBTS:
            self.failed(engine, now, error)
            engine.distrusted = True
        else:
            engine.last_error = error

    @staticmethod
    def passed_check(engine: EngineState) -> None:
        """It is healthy by its own account: in again, but the next failure takes it out for longer, until it answers a call."""
        if not engine.distrusted:
            engine.out_until = 0.0
