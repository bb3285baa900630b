"""Kills at an exact operation: the recorded operations of a run, the planned strikes by phase, and the strikes that happened.

Invariant: a strike kills once. It is recorded before the process dies, and a process that starts later does not arm it
again. A run with any number of strikes therefore ends.

An operation has the same name in every run of one configuration: `create iterations/000003/validate/manifest.json`, `write
checkpoints/000002/a*/trainer/optimizer.safetensors`, `refit version 2`, `mlflow log_batch`, `prefect POST /artifacts/`.

    before     the operation has not begun
    torn       half of the bytes are in the temporary file
    unplaced   all bytes are in the temporary file, not under their name
    during     some milliseconds into a call to another process
    after      the operation is done; the process dies before the next one
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

PLAN_VARIABLE = "ROUNDHOUSE_CHAOS_PLAN"
FAMILIES = {
    "data": re.compile(r"^write iterations/.*\.(parquet|json)$"),
    "manifest": re.compile(r"^create iterations/.*/manifest\.json$"),
    "attempt": re.compile(r"^create .*/attempt-"),
    "checkpoint": re.compile(r"^(write|create|delete|delete_tree) checkpoints/"),
    "pointer": re.compile(r"^(write|create) [^/]+$"),
    "refit": re.compile(r"^refit "),
    "mlflow": re.compile(r"^mlflow "),
    "prefect": re.compile(r"^prefect "),
}
"""Operations by what they leave half done; each family is drawn as often as any other."""


@dataclass(frozen=True)
class Operation:
    """A recorded operation of a process."""

    process: str
    """flow or trainer."""
    name: str
    phases: tuple[str, ...]

    @property
    def family(self) -> str:
        return next((family for family, pattern in FAMILIES.items() if pattern.search(self.name)), "other")


@dataclass(frozen=True)
class Strike:
    """SIGKILL at a phase of the n-th operation of that name in one process."""

    process: str
    name: str
    phase: str
    nth: int = 1
    milliseconds: float = 0.0

    def __str__(self) -> str:
        nth = f" (the {self.nth}th of a process)" if self.nth > 1 else ""
        return f"{self.process} {self.phase} {self.name}{nth}"


@dataclass(frozen=True)
class Plan:
    """Plan for the instrumented processes of one trial, a file that they read when they start."""

    strikes: tuple[Strike, ...]
    done: Path
    """A line for each strike, written right before it."""
    recording: Path | None = None
    """A line for each operation, when they shall be recorded."""

    def save(self, path: Path) -> None:
        body = {
            "strikes": [asdict(strike) for strike in self.strikes],
            "done": str(self.done),
            "recording": None if self.recording is None else str(self.recording),
        }
        path.write_text(json.dumps(body, indent=1))

    @classmethod
    def load(cls, path: Path) -> Plan:
        body = json.loads(path.read_text())
        strikes = tuple(Strike(**raw) for raw in body["strikes"])
        return cls(strikes, Path(body["done"]), None if body["recording"] is None else Path(body["recording"]))

    def done_strikes(self) -> list[tuple[float, Strike]]:
        """Strikes that happened, with their moments in seconds since the epoch."""
        if not self.done.exists():
            return []
        lines = [json.loads(line) for line in self.done.read_text().splitlines()]
        return [(line["at"], Strike(**line["strike"])) for line in lines]

    def armed(self, process: str) -> list[Strike]:
        """Strikes that a process of this kind still has to expect."""
        done = {strike for _, strike in self.done_strikes()}
        return [strike for strike in self.strikes if strike.process == process and strike not in done]

    def write_done(self, strike: Strike) -> None:
        _append(self.done, {"at": time.time(), "strike": asdict(strike)})

    def record(self, operation: Operation) -> None:
        if self.recording is not None:
            _append(self.recording, asdict(operation))


def recorded(path: Path) -> list[Operation]:
    """The operations of a recorded run, each once, in their order."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {
        (line["process"], line["name"]): Operation(line["process"], line["name"], tuple(line["phases"]))
        for line in lines
    }
    return list(found.values())


def draw_strikes(seed: int, count: int, operations: Sequence[Operation]) -> list[Strike]:
    """Strikes at different operations, their families evenly; the same for the same seed."""
    rng = random.Random(f"strikes {seed}")
    families: dict[str, list[Operation]] = {}
    for operation in operations:
        families.setdefault(operation.family, []).append(operation)
    drawn: dict[str, Strike] = {}
    while len(drawn) < min(count, len(operations)):
        operation = rng.choice(families[rng.choice(sorted(families))])
        drawn.setdefault(f"{operation.process} {operation.name}", _strike(operation, rng.choice(operation.phases), rng))
    return list(drawn.values())


def by_trainer_process(operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations of the same run with training steps in separate processes, which write the new version's files."""
    written = re.compile(r"^write checkpoints/(?!000000/)")
    return [replace(one, process="trainer") if written.match(one.name) else one for one in operations]


def every_strike(operations: Iterable[Operation], iterations: Collection[int]) -> list[Strike]:
    """Each phase of each operation on the store in these iterations."""
    places = [f"{iteration:06d}" for iteration in iterations]
    rng = random.Random(0)
    return [
        _strike(operation, phase, rng)
        for operation in operations
        for phase in operation.phases
        if any(f"/{place}/" in operation.name for place in places)
    ]


def _strike(operation: Operation, phase: str, rng: random.Random) -> Strike:
    nth = rng.randint(1, 12) if operation.family == "prefect" else 1
    return Strike(operation.process, operation.name, phase, nth, rng.uniform(0, 250) if phase == "during" else 0.0)


def _append(path: Path, value: object) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(value) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
