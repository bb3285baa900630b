"""Sinks of a run's metrics: JSON lines, those of plug-ins, and classes of the user.

Invariant: a sink gets each iteration once, also if the run is resumed; a sink that raises costs a warning, and never the run.

    <infra.state>/metrics/                 files of the sinks
    <infra.state>/metrics/<run uid>.wandb  number of the newest iteration that the sink `wandb` has
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from roundhouse.activity import announce
from roundhouse.stages.report import iteration_manifests, iteration_metrics, sink_class
from roundhouse.store.run import Run

log = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Class of `tracking.sinks`; it is made with the run.

    It may define `close`, which is called once when the process has ended its work on the run, and `package`, the name of a
    package that it needs.
    """

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an iteration, by the names of docs/metrics.md. After a restart all iterations come again, oldest
        first: skip or replace an iteration that the sink has."""
        ...


class JsonLinesSink:
    """A line of JSON an iteration: `{"iteration": 3, "reward/mean": 0.5, …}`. A torn last line is written again."""

    def __init__(self, run: Run) -> None:
        self.file = metrics_directory(run) / f"{run.run_id}.jsonl"
        self.file.touch()
        whole = self.file.read_bytes().rpartition(b"\n")
        os.truncate(self.file, len(whole[0] + whole[1]))
        self._written = {json.loads(line)["iteration"] for line in whole[0].splitlines()}

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration not in self._written:
            with self.file.open("a") as file:
                file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
            self._written.add(iteration)


class RememberingSink(ABC):
    """Base of sinks that cannot be asked which iterations they have: a file next to them holds the newest one."""

    package: ClassVar[str]

    def __init__(self, run: Run) -> None:
        self._file = metrics_directory(run) / f"{run.uid}.{self.package}"
        self.next = int(self._file.read_text()) + 1 if self._file.exists() else run.first_version
        """The first iteration that the sink lacks."""

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration >= self.next:
            self.write(iteration, metrics)
            temporary = self._file.with_name(f"{self._file.name}.new")
            temporary.write_text(str(iteration))
            temporary.replace(self._file)
            self.next = iteration + 1

    @abstractmethod
    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an iteration that the sink lacks."""


class Sinks:
    """Sinks of a run, without MLflow, for the time that a process works on it."""

    def __init__(self, run: Run) -> None:
        """
        Raises:
            ConfigError: a class cannot be found, or a package is missing.
        """
        names = [name for name in run.config.tracking.sinks if name != "mlflow"] if run.config.tracking.enabled else []
        self._run, self._next = run, run.first_version
        classes: list[Callable[[Run], MetricsSink]] = [sink_class(name) for name in names]
        self._sinks: list[MetricsSink] = []
        for name, sink in zip(names, classes, strict=True):
            try:
                self._sinks.append(sink(run))
            except Exception as error:  # noqa: BLE001 (border of the sink's own code)
                _warn(f"tracking.sinks: {name} cannot be opened, and this run continues without it: {error!r}")

    def update(self) -> None:
        """Give the sinks the iterations that have been reported since."""
        while self._sinks and self._run.is_reported(self._next):
            metrics = iteration_metrics(iteration_manifests(self._run, self._next))
            for sink in self._sinks:
                try:
                    sink.log_iteration(self._next, metrics)
                except Exception as error:  # noqa: BLE001 (border of the sink's own code)
                    _warn(f"tracking.sinks: {type(sink).__name__} did not take iteration {self._next}: {error!r}")
            self._next += 1

    def close(self) -> None:
        """Close the sinks that define it."""
        for sink in self._sinks:
            close: Callable[[], Any] = getattr(sink, "close", lambda: None)
            try:
                close()
            except Exception as error:  # noqa: BLE001 (border of the sink's own code)
                _warn(f"tracking.sinks: {type(sink).__name__} cannot be closed: {error!r}")


def metrics_directory(run: Run) -> Path:
    """Return the directory of the sinks' files, which exists."""
    directory = Path(run.config.infra.state) / "metrics"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _warn(text: str) -> None:
    """Log a warning, and show it to the person at the terminal."""
    log.warning("%s", text)
    announce("alert", name="tracking", text=text)
