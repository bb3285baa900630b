"""The launcher interface, and the programs that launchers run.

Invariant: a program does the same wherever it runs: it reads its spec at its place and leaves its report or its error
there. `Launcher.run` returns after the program has ended successfully, and leaves none running: it starts the program,
passes on its output, and ends it when it is not wanted any more.

    training step     ranks of one model, a report a step            train.service.launcher
    shard             a worker of a collection, a report a shard     rollout.distribution.launcher
    resident ranks    serve the verbs until they are ended           train.service.launcher

    with open_launcher("subprocess", "train.service.launcher", run) as launcher:
        place = launcher.run(program, log.info, threading.Event())

A launcher is one class, found by the name of its plug-in, or named by a run as `module:Class`.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from pydantic import BaseModel

from roundhouse import plugins
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run
from roundhouse.training.service.job_entry import ERROR, REPORT, SPEC

Say = Callable[[str], None]


class Stopped(Exception):
    """The program was ended because its result is not wanted any more."""


@dataclass(frozen=True)
class GroupMember:
    """One of several machines that together run the ranks of one group."""

    machines: int
    machine: int
    """Number of the machine; ranks start at machine 0."""
    address: str
    """Address of machine 0, the meeting point."""
    port: int


@dataclass(frozen=True)
class Program:
    """`python -m <module> --spec <place>/spec.json`, in one process or several ranks that find each other."""

    what: str
    """For a person: `The training step`."""
    module: str
    spec: BaseModel
    place: Location
    """Directory for the spec, and for the report or the error that the program leaves."""
    place_field: str
    """Field of the spec that names the place."""
    stage: str
    """Stage of the activity and the pods: `train` or `collect`."""
    timeout_seconds: float
    timeout_key: str
    """Configuration key of the time limit, for the error."""
    ranks: int = 1
    """On each of its machines."""
    group: GroupMember | None = None
    """Its machine among several, set by a launcher that starts it on them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of every program of its launcher."""
    iteration: int = 0
    kind: str = "train"
    """Kind of the stage."""
    stage_uri: str = ""
    """The stage's directory."""
    label: str = ""
    """Its part of the stage, if several programs share it."""
    digest: str = ""
    """Digest of all its dependencies, by which a launcher finds a program that outlived this process."""
    after: str = ""
    """Digest of the report that lay at its place before, which is not its own."""
    stays: bool = False
    """It serves until it is ended, and belongs to the process that had it started: a program that another one left is ended."""
    is_progress: Callable[[str], bool] | None = None
    """Returns whether a line shows that it is at work; until then it may be silent while it waits for a machine. None:
    it logs little, and may be silent until its time limit."""

    def prepare(self, place: Location | None = None) -> None:
        """Write the program's spec, and delete an earlier program's error."""
        place = place or self.place
        placed = self.spec.model_copy(update={self.place_field: place.uri})
        place.write(SPEC, placed.model_dump_json().encode())
        place.delete(ERROR)

    def has_report(self) -> bool:
        """Return whether the program's report exists."""
        try:
            content = self.place.read(REPORT)
        except NotFound:
            return False
        return hashlib.sha256(content).hexdigest() != self.after


class Launcher(ABC):
    """Starts programs of one stage, watches and ends them; usable from several threads."""

    same_machine: ClassVar[bool] = False
    """Whether its programs can use this machine's files and its loopback interface."""
    ending_seconds: float = 10.0
    """Time that programs have to end after the request."""
    waiting_seconds: float = 0.0
    """Time that a program may wait for its machines before it starts, in addition to its own limit."""

    def __init__(self, run: Run | None) -> None:
        """Create the launcher. `run` is the run of the stage that starts the programs; None if none is needed."""

    def expect(self, programs: Sequence[Program]) -> None:
        """Announce all programs of a stage before the first is run. Earlier programs of the stage that are not among
        them are ended."""

    @abstractmethod
    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        """Run the program to its end and return the place of its report.

        Args:
            said: receives each output line of the program, and the reasons for waiting.
            stopped: once set, the program is ended.

        Raises:
            DataError, ConfigError, StoreError: as the program raised them.
            InfraError: it was lost, or took too long.
            Stopped: `stopped` was set.
        """

    def caches(self, own: Path) -> dict[str, object]:
        """Return the spec's fields for the program's download cache. `own` is this process's cache."""
        return {"cache": str(own)}

    def metrics(self) -> dict[str, float]:
        """CPU seconds of the process that waits for the programs, their own not counted; final once it is closed."""
        return {}

    def close(self) -> None:
        """Release resources; no program is running any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_launcher(name: str, key: str, run: Run | None) -> Launcher:
    """Open the launcher of this name.

    Args:
        name: of a plug-in, or `module:Class`.
        key: the configuration key that names it, for the error.

    Raises:
        ConfigError: the class does not exist.
        InfraError: its machines cannot be reached.
    """
    return plugins.chosen("launcher", name, Launcher, key)(run)
