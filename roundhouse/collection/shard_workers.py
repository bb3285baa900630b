"""Where the workers of shards run: processes here, Jobs in `shard_jobs`.

Invariant: wherever it runs, a worker does the same with the same spec (`shard_worker.carry_out`). `Workers.run` returns when
the worker has ended, with its report in the store or an error that says what became of it, and leaves none running.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from roundhouse.collection.shards import SPEC, ShardSpec
from roundhouse.config.distribution import JobShards, ProcessShards
from roundhouse.launch.child_process import ENDING_SECONDS, ChildProcess
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.training.service.job_entry import ERROR, read_error

Say = Callable[[str], None]
TIMEOUT_KEY = "rollout.distribution.timeout_seconds"


@dataclass(frozen=True)
class ShardTask:
    """A shard that is to be collected."""

    spec: ShardSpec
    label: str
    after: str
    """Digest of the report that it goes on from, if any: with it, the task is another one."""

    @property
    def place(self) -> Location:
        return Location(self.spec.place)

    @property
    def spec_uri(self) -> str:
        return f"{self.spec.place}/{SPEC}"

    def began_on(self, version: int) -> ShardTask:
        """The same task, begun when the engine holds this version."""
        return replace(self, spec=self.spec.model_copy(update={"began_on": version}))

    def prepare(self) -> None:
        """Write down what the worker reads, and forget the error of an earlier one."""
        self.place.write(SPEC, self.spec.model_dump_json().encode())
        self.place.delete(ERROR)


class Workers(AbstractContextManager["Workers"], Protocol):
    """Workers of one kind; usable from several threads."""

    ending_seconds: float
    """How long they take to end when they are told to."""

    def metrics(self) -> dict[str, float]:
        """What they cost whoever waits for them, beside the shards' own work."""
        ...

    def run(self, task: ShardTask, said: Say, stopped: threading.Event) -> None:
        """Have one worker carry out the task, to its end.

        Args:
            said: given each line that the worker says, and what it waits for.
            stopped: once set, the worker is told to end; this raises then.

        Raises:
            DataError, ConfigError, StoreError: as the worker raised them.
            InfraError: it was lost, or took too long.
        """
        ...


def workers_of(run: Run, tasks: Sequence[ShardTask]) -> Workers:
    """The workers that the configuration wants for these tasks."""
    distribution = run.config.rollout.distribution
    if isinstance(distribution, JobShards):
        from roundhouse.collection.shard_jobs import JobWorkers

        return JobWorkers(run, distribution, tasks)
    assert isinstance(distribution, ProcessShards), "who collects together has no workers"
    return ProcessWorkers(distribution.timeout_seconds)


class ProcessWorkers:
    """A process for each shard. They end with this one, however it ends."""

    ending_seconds = ENDING_SECONDS + 2.0

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="roundhouse-shards-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.cleanup()

    def metrics(self) -> dict[str, float]:
        return {}

    def run(self, task: ShardTask, said: Say, stopped: threading.Event) -> None:
        task.prepare()
        process = ChildProcess(
            f"Shard {task.label}",
            ["-m", "roundhouse.collection.shard_worker", "--spec", task.spec_uri],
            Path(self._scratch.name) / f"{task.label}.log",
            self._timeout_seconds,
            TIMEOUT_KEY,
        )
        if (code := process.run("collect", said, stopped)) != 0:
            raise read_error(task.place) or process.error_of(code)
