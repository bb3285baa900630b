"""Programs that run elsewhere: what a launcher is, and what it is given.

Invariant: wherever a program runs, it does the same with the same spec, which it reads at its place and beside which it leaves
its report or its error. `Launcher.run` returns when the program has ended well, and leaves none running: it starts the program,
passes on what it says, and ends it when it is not wanted any more.

    training step     ranks of one model, a report a step            train.service.launcher
    shard             a worker of a collection, a report a shard     rollout.distribution.launcher
    resident ranks    serve the verbs until they are ended           train.service.launcher

    with open_launcher("subprocess", "train.service.launcher", run) as launcher:
        place = launcher.run(program, log.info, threading.Event())

A launcher is one class, named in `roundhouse.config.section.LAUNCHERS` or by a run as `module:Class`.
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

from roundhouse.config.section import LAUNCHERS
from roundhouse.imports import load_class
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run
from roundhouse.training.service.job_entry import ERROR, REPORT, SPEC

Say = Callable[[str], None]


class Stopped(Exception):
    """The program was ended because its result is not wanted any more."""


@dataclass(frozen=True)
class GroupMember:
    """One of several machines whose ranks are one group."""

    machines: int
    machine: int
    """From 0, where ranks begin."""
    address: str
    """Of machine 0, where they meet."""
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
    """Of the spec, that names the place."""
    stage: str
    """Whose activity it is, and whose pods: `train` or `collect`."""
    timeout_seconds: float
    timeout_key: str
    """Of the configuration, to raise when it takes longer."""
    ranks: int = 1
    """On each of its machines."""
    group: GroupMember | None = None
    """Where it is one of several machines', set by a launcher that starts it on them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those that every program of its launcher has."""
    iteration: int = 0
    kind: str = "train"
    """Of the stage."""
    stage_uri: str = ""
    """The stage's directory."""
    label: str = ""
    """Which part of its stage it does, where several programs do it."""
    digest: str = ""
    """Of all that it depends on: a launcher whose programs outlive this process finds it again by it."""
    after: str = ""
    """Digest of the report that lay at its place before, which is not its own."""
    stays: bool = False
    """It serves until it is ended, and belongs to the process that had it started: a program that another one left is ended."""
    is_progress: Callable[[str], bool] | None = None
    """Whether a line says that it is at work; until then it may be silent while it waits for a machine. None: it says little,
    and may be silent until its time is over."""

    def prepare(self, place: Location | None = None) -> None:
        """Write down what the program reads, and forget the error of an earlier one."""
        place = place or self.place
        placed = self.spec.model_copy(update={self.place_field: place.uri})
        place.write(SPEC, placed.model_dump_json().encode())
        place.delete(ERROR)

    def has_report(self) -> bool:
        """Whether the program has left its report, and it is there still."""
        try:
            found = self.place.read(REPORT)
        except NotFound:
            return False
        return hashlib.sha256(found).hexdigest() != self.after


class Launcher(ABC):
    """Starts programs of one stage, watches and ends them; usable from several threads."""

    same_machine: ClassVar[bool] = False
    """Whether its programs see this machine's files and its loopback interface."""
    ending_seconds: float = 10.0
    """How long programs may take to end after they are asked to."""
    waiting_seconds: float = 0.0
    """How long a program may wait for its machines before it starts, beyond its own time."""

    def __init__(self, run: Run | None) -> None:
        """`run` is the run whose stage starts the programs; None for one that needs none."""

    def expect(self, programs: Sequence[Program]) -> None:
        """All programs of a stage, before the first is run. What the stage began earlier and is not among them is ended."""

    @abstractmethod
    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        """Have the program run to its end; the place where it left its report.

        Args:
            said: given each line that the program says, and what it waits for.
            stopped: once set, the program is ended.

        Raises:
            DataError, ConfigError, StoreError: as the program raised them.
            InfraError: it was lost, or took too long.
            Stopped: `stopped` was set.
        """

    def caches(self, own: Path) -> dict[str, object]:
        """Fields of a spec: where its program keeps what it downloads. `own` is this process's cache."""
        return {"cache": str(own)}

    def metrics(self) -> dict[str, float]:
        """CPU seconds of the process that waits for the programs, their own not counted; final once it is closed."""
        return {}

    def close(self) -> None:
        """Let go of what it holds; no program runs any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_launcher(name: str, key: str, run: Run | None) -> Launcher:
    """The launcher of this name.

    Args:
        name: one of `LAUNCHERS`, or `module:Class`.
        key: the configuration key that names it, for the error.

    Raises:
        ConfigError: there is no such class.
        InfraError: the machines where it starts programs cannot be reached.
    """
    return load_class(LAUNCHERS.get(name, name), Launcher, key)(run)
