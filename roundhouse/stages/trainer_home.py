"""The trainer that a run keeps in this process between iterations, and the writer of its state.

Invariant: a home has at most one trainer. It holds exactly the version of its key, and does not change before the state of that
version is written.

A trainer may write its state after its version was published, in parallel with the next refit and collection. A start without
the state makes it again from the previous version.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

from roundhouse.cpu import attribute_to_this_stage, clock
from roundhouse.errors import InfraError
from roundhouse.store.run import Run
from roundhouse.store.stage import ModelFiles, Reference, read_manifest

if TYPE_CHECKING:
    from roundhouse.training.service.verbs import TrainService
    from roundhouse.training.trainer import Trainer

logger = logging.getLogger(__name__)

Key = tuple[int | float | str, ...]
GIVES_WAY = 5
"""Nice value of the writer relative to the refit and collection that run at the same time."""
BUSY_SECONDS = 10.0
"""Time for a replica that is sent weights, at the end of a flow that may have failed because of it."""


def key_of(run: Run, version: int, files: ModelFiles) -> Key:
    """Return the key of a kept trainer: files of its version and the `train` section."""
    weights = "+".join(entry.sha256 for entry in files.weights().values())
    return version, weights, run.config.train.model_dump_json(), run.config.generation.sampling.temperature


class StateWriter:
    """Writes the state of the trainer that made a version, in a separate thread."""

    def __init__(self, run: Run, update: Reference, trainer: Trainer, busy: threading.Lock) -> None:
        self._run, self._update, self._trainer, self._busy = run, update, trainer, busy
        self.error: BaseException | None = None
        self.cpu_seconds = 0.0
        self._began = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="trainer state", daemon=True)

    def begin(self) -> None:
        """Write, unless that has begun."""
        if self._began.acquire(blocking=False):
            self._thread.start()

    def end(self) -> None:
        """Return when it is written, or has failed."""
        self.begin()
        self._thread.join()

    def _write(self) -> None:
        with self._busy:
            if sys.platform == "linux":  # on Linux each thread has a priority, which its child threads inherit
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + GIVES_WAY))
            run, version = self._run, self._update.iteration
            with attribute_to_this_stage():
                seconds = clock()
                began = seconds()
                try:
                    attempt = run.begin(run.trainer_state(version), policy_version=version)
                    written = self._trainer.store(attempt.stage.location, attempt.name, weights=False)
                    for entry in written.files:
                        attempt.adopt(entry)
                    attempt.commit(inputs={"train": self._update}, directory=written.directory)
                except BaseException as error:  # noqa: BLE001 - raised by `wait_for_state`
                    self.error = error
                self.cpu_seconds = seconds() - began


class TrainerHome:
    """The trainer of one run between its iterations."""

    def __init__(self) -> None:
        self.needs_process = False
        """No memory was found for a trainer here, and this process may be left without threads or room: the next one is opened
        in another process."""
        self._kept: tuple[Key, Trainer] | None = None
        self._writer: StateWriter | None = None
        self._busy = threading.Lock()
        """Held while the kept trainer is in use: for a refit, to write its state, or to close it."""

    @property
    def trainer(self) -> Trainer | None:
        """The kept trainer."""
        return None if self._kept is None else self._kept[1]

    def keep(self, key: Key, trainer: Trainer) -> None:
        """Keep a trainer until `take` or `release`."""
        self._kept = key, trainer

    def take(self, key: Key) -> Trainer | None:
        """Return the trainer with this key, which is not kept any more."""
        with self._busy:
            if self._kept is None or self._kept[0] != key:
                return None
            trainer, self._kept = self._kept[1], None
            return trainer

    @contextmanager
    def holding(self, key: Key) -> Iterator[TrainService | None]:
        """Yield the service of the idle trainer with this key, for exclusive use in the block; None if it does not exist or is
        busy."""
        if not self._busy.acquire(blocking=False):
            yield None
            return
        try:
            yield self._kept[1].learner.service if self._kept is not None and self._kept[0] == key else None
        finally:
            self._busy.release()

    def write_later(self, run: Run, update: Reference, trainer: Trainer) -> None:
        """Let `write_state` write the state of the kept trainer, which made a version."""
        self._writer = StateWriter(run, update, trainer, self._busy)

    def write_state(self) -> None:
        """Start to write the trainer's state in the background. If the next refit reads weights from the trainer, the
        refit is first."""
        if self._writer is not None:
            self._writer.begin()

    def wait_for_state(self) -> float:
        """Wait until no state is being written, and return the CPU seconds of the writing.

        Raises:
            RoundhouseError: the state could not be written, and the trainer is closed; the state is made again when needed.
        """
        if self._writer is None:
            return 0.0
        writer = self._writer
        writer.end()
        self._writer = None
        if writer.error is not None:
            self.release()
            raise writer.error
        return writer.cpu_seconds

    def release(self, patience_seconds: float = -1) -> None:
        """Release the resources that are kept between iterations: memory, machines, a server session.

        Args:
            patience_seconds: time to wait for the trainer's present user. -1: wait until it is done.

        Raises:
            InfraError: it was not done in time.
        """
        try:
            self.wait_for_state()
        except Exception as error:  # noqa: BLE001 - an error that ends the run, if any, is more important
            logger.warning("The trainer's state was not written: %s The next start trains that iteration again.", error)
        if not self._busy.acquire(timeout=patience_seconds):
            raise InfraError(f"The trainer is in use after {patience_seconds:g} s.")
        try:
            last, self._kept = self._kept, None  # closed once, whether or not that succeeds
            if last is not None:
                last[1].close()
        finally:
            self._busy.release()


_homes: dict[str, TrainerHome] = {}
"""By the uid of a run that is under way in this process."""


def trainer_home(run: Run) -> TrainerHome:
    """Return the home of a run's trainer."""
    return _homes.setdefault(run.uid, TrainerHome())


@contextmanager
def trainer_released_at_end(run: Run) -> Iterator[None]:
    """On exit, wait for the state writer and release the trainer."""
    try:
        yield
    finally:
        try:
            trainer_home(run).release(BUSY_SECONDS)
        except Exception as error:  # noqa: BLE001 - the error that ended the block, if any, is more important
            logger.warning("The trainer ends with this process: %s", error)
        else:
            _homes.pop(run.uid, None)


def release_trainers() -> None:
    """Release the trainers of all runs in this process, when they are idle."""
    for home in list(_homes.values()):
        home.release()


def make_room_for(run: Run) -> None:
    """Release the idle trainers of this process, so that it holds memory for one. A trainer in use is its run's."""
    trainer_home(run).release()
    for uid, home in list(_homes.items()):
        if uid != run.uid and home.trainer is not None:
            with suppress(InfraError):
                home.release(0)


def trainer_holding(run: Run, version: Reference) -> AbstractContextManager[TrainService | None]:
    """Return a context with the service of an idle trainer that holds exactly this version, or with None."""
    return trainer_home(run).holding(key_of(run, version.policy_version, read_manifest(version).model_files))
