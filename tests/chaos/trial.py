"""One trial: a run whose processes are killed, at given moments and at given operations, and which is started again until it
has finished.

Invariant: nothing but kills and starts of the same command happens to the run, and a trial ends: finished, or with an error
that says what was killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from roundhouse.store.run import load_run
from tests.chaos.outcome import Outcome
from tests.chaos.stand import Stand
from tests.chaos.strikes import PLAN_VARIABLE, Plan, Strike

TARGETS = ("flow", "collector", "engine", "environment", "trainer", "prefect", "mlflow")
STALL_SECONDS = 600.0
"""A run in which nothing begins, ends or is killed for so long hangs."""
GLANCE_SECONDS = 0.25
FAILED_STARTS = 5
"""So many starts in a row that fail although nothing was killed meanwhile are no bad luck."""
PATIENCE_SECONDS = 120.0
"""How long a kill waits for its process to be at work; then it is left out."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a process, so many seconds after the one before (or after the start)."""

    target: str
    after: float
    into: float = 0.0
    """For the collector and the trainer, which come and go: so many seconds after it was seen at work."""
    early: bool = False
    """Whether a start counts: else the seconds run only while the flow is beyond its imports and has begun a stage."""


@dataclass(frozen=True)
class Done:
    """A kill that happened."""

    target: str
    at: float
    """Seconds since the trial's start."""
    where: str
    """Stage, or operation and phase."""

    def __str__(self) -> str:
        return f"{self.target} at {self.at:.1f} s in {self.where}"


@dataclass
class Trial:
    """A finished trial."""

    run_id: str
    done: list[Done]
    starts: int
    seconds: float
    outcome: Outcome
    working_seconds: float = 0.0
    """Of `seconds`, those after a start had begun its first stage."""


def draw_kills(seed: int, count: int, span: float, targets: Sequence[str]) -> list[Kill]:
    """Moments spread over about `span` seconds of a run's work, one in five counting starts too; the same for the same seed."""
    rng = random.Random(seed)
    return [
        Kill(rng.choice(targets), rng.uniform(0, 2 * span / count), rng.uniform(0, 1.5), rng.random() < 0.2)
        for _ in range(count)
    ]


def play(
    stand: Stand, run_id: str, kills: Sequence[Kill], strikes: Sequence[Strike] = (), record: bool = False, **keys: Any
) -> Trial:
    """Run under fire until it has finished; `record` writes its operations to `<run id>.operations`."""
    return _Play(stand, run_id, kills, strikes, record, keys).finish()


class _Play:
    """A trial in progress."""

    def __init__(
        self,
        stand: Stand,
        run_id: str,
        kills: Sequence[Kill],
        strikes: Sequence[Strike],
        record: bool,
        keys: dict[str, Any],
    ) -> None:
        self._stand, self._run_id = stand, run_id
        self._kills, self._strikes = tuple(kills), tuple(strikes)
        self._store = str(keys.get("store", stand.settings["store"]))
        self._configuration = stand.configuration(run_id, **keys)
        place = stand.directory
        recording = place / f"{run_id}.operations" if record else None
        self._plan = Plan(self._strikes, place / f"{run_id}.struck", recording)
        self._environment: dict[str, str] | None = None
        if self._strikes or record:
            self._plan.save(place / f"{run_id}.plan")
            self._environment = {PLAN_VARIABLE: str(place / f"{run_id}.plan")}
        self._begun, self._begun_at = time.monotonic(), time.time()
        self._done: list[Done] = []
        self._codes: list[int] = []
        self._in_vain, self._working = 0, 0.0
        self._state, self._changed_at, self._looked_at = ("", 0, 0, 0), self._begun, self._begun
        self._flow = self._start()

    def finish(self) -> Trial:
        starts, waiting = 1, list(self._kills)
        worked, seen, overdue, before = 0.0, None, 0.0, time.monotonic()
        while True:
            self._stand.keep()
            now = time.monotonic()
            passed, before = now - before, now
            at_work = self._has_begun()
            self._working += passed if at_work else 0.0
            if waiting:
                kill = waiting[0]
                worked += passed if kill.early or at_work else 0.0
                if worked >= kill.after:
                    overdue += passed
                    if seen is None and self._is_at_work(kill.target):
                        seen = now
                    if (seen is not None and now >= seen + kill.into) or overdue > PATIENCE_SECONDS:
                        self._kill(waiting.pop(0))
                        worked, seen, overdue = 0.0, None, 0.0
            if (code := self._flow.poll()) is not None:
                self._codes.append(code)
                if code == 0:
                    break
                starts += 1
                self._in_vain = self._in_vain + 1 if code > 0 else 0
                self._flow = self._start()
            self._refuse_endless()
            time.sleep(0.02)
        return self._finished(starts)

    def _finished(self, starts: int) -> Trial:
        seconds = time.monotonic() - self._begun
        for at, strike in self._plan.done_strikes():
            where = f"{strike.phase} {strike.name}"
            self._done.append(Done(f"{strike.process} (planted)", at - self._begun_at, where))
        run = load_run(self._store, self._run_id)
        done = sorted(self._done, key=lambda one: one.at)
        return Trial(self._run_id, done, starts, seconds, Outcome.of(run), self._working)

    def _start(self) -> Any:
        self._glanced_at = 0.0
        self._attempts, self._begun_a_stage = self._stand.count_attempts(self._store, self._run_id), False
        return self._stand.train(self._configuration, self._environment)

    def _has_begun(self) -> bool:
        """Return whether the current flow has begun a stage."""
        if not self._begun_a_stage and time.monotonic() - self._glanced_at > GLANCE_SECONDS:
            self._glanced_at = time.monotonic()
            self._begun_a_stage = self._stand.count_attempts(self._store, self._run_id) > self._attempts
        return self._begun_a_stage

    def _is_at_work(self, target: str) -> bool:
        if target == "collector":
            return self._flow.poll() is None and self._where().endswith("/collect")
        return self._pid(target) is not None

    def _pid(self, target: str) -> int | None:
        if target in ("flow", "collector"):
            return int(self._flow.pid)
        if target == "trainer":
            return _trainer_of(self._flow.pid)
        return self._stand.pid_of(target)

    def _kill(self, kill: Kill) -> None:
        where, pid = self._where(), self._pid(kill.target)
        if pid is not None and _kill(pid):
            self._done.append(Done(kill.target, time.monotonic() - self._begun, where))
            self._in_vain = 0

    def _where(self) -> str:
        return self._stand.newest_stage(self._store, self._run_id)

    def _refuse_endless(self) -> None:
        """Fail a run that neither ends nor makes progress."""
        now = time.monotonic()
        if now - self._looked_at < 10:
            return
        self._looked_at = now
        state = (
            self._where(),
            self._stand.count_attempts(self._store, self._run_id),
            len(self._codes),
            len(self._done),
        )
        if state != self._state:
            self._state, self._changed_at = state, now
        seconds = now - self._begun
        if now - self._changed_at > STALL_SECONDS or self._in_vain >= FAILED_STARTS:
            _kill(self._flow.pid)
            raise TimeoutError(
                f"{self._run_id} has not finished after {seconds:.0f} s in {self._where()}; killed so far: "
                f"{[str(one) for one in self._done]}; exit codes: {self._codes}; the log's end: {self._last_lines()}"
            )

    def _last_lines(self) -> str:
        log = self._stand.directory / f"{self._run_id}.log"
        return log.read_text(errors="replace")[-1500:]


def _kill(pid: int) -> bool:
    """Kill a process and its children at once, as losing the machine would."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        children = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return True
    return False


def _trainer_of(flow: int) -> int | None:
    """The training step's process of a flow, where `train.service` is a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(flow).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "--spec" in child.cmdline():
                    return child.pid
    return None
