"""Tracking of a run: a thread that writes to MLflow what the store has and MLflow lacks.

Invariant: a run never waits for MLflow while it works. The server may not be up yet, hang, answer with errors or die: the
thread tries again, at every new iteration and at least once a minute, and writes everything that is missing as soon as it can.
Only at its end a run waits, as long as the page grows, and for `PATIENCE_SECONDS` where it does not.

The other sinks of `tracking.sinks` are given each iteration's metrics as it is reported; one that raises costs a warning.

    run      ── update() ──────────── update() ──── finish() … the summary says whether MLflow has everything
    thread        └ refused ┄ again ┄ refused ┄ again ─ iterations 0 to 7 ─ closed
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from roundhouse.config.secrets import masked_text
from roundhouse.errors import ConfigError
from roundhouse.imports import load_class
from roundhouse.stages.report import iteration_manifests, iteration_metrics, stage_seconds
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind
from roundhouse.tracking import mlflow
from roundhouse.tracking.mlflow import MlflowRun

PATIENCE_SECONDS = 30.0
"""How long the end of a run waits for a page that does not grow: as long as MLflow needs for a restart."""
PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds between two attempts at a server that does not answer; the last is repeated."""
POSTED = 1000
"""So many gauges and tags are kept for a server that is away: one a minute for most of a day."""

log = logging.getLogger(__name__)


class Tracker:
    """What writes one run's page in MLflow, for the time that a process works on the run."""

    def __init__(self, run: Run, uri: str) -> None:
        self._run = run
        self._uri = uri
        self._page: MlflowRun | None = None
        self._posted: deque[Callable[[MlflowRun], None]] = deque(maxlen=POSTED)
        self._changed = threading.Condition()
        self._asked = 1
        """Number of the newest request to look into the store."""
        self._answered = 0
        """Number of the newest request since which everything was written."""
        self._ending = ""
        """Status to close the page with."""
        self._stopped = False
        self._written = 0
        self._failures = 0
        self._reason = "it has not answered yet"
        self._thread = threading.Thread(target=self._follow, name="tracking", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str | None:
        """Address of the page; None until the server has answered."""
        return None if self._page is None else self._page.url

    def update(self) -> None:
        """Say that the store may have more than before."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def tag(self, tags: dict[str, str]) -> None:
        """Set tags of the page."""
        self._post(lambda page: page.tag(tags))

    def log_gauges(self, gauges: dict[str, float]) -> None:
        """Log numbers of this moment."""
        now = time.time()
        self._post(lambda page: page.log_gauges(gauges, now))

    def follow_store(self) -> None:
        """Say that a promotion was answered."""
        self._post(MlflowRun.follow_store)

    def settle(self) -> bool:
        """Wait until the page has all that the store has; whether it has.

        Returns False when it has not grown for `PATIENCE_SECONDS`; before the run's end, also when an attempt has failed.
        """
        with self._changed:
            while self._answered < self._asked:
                before = self._written
                self._changed.wait_for(lambda: self._answered >= self._asked or self._gave_up(), PATIENCE_SECONDS)
                if self._written == before or self._gave_up():
                    break
            return self._answered >= self._asked

    def stop(self) -> None:
        """Write no more than what is being written."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def finish(self, status: str = "FINISHED") -> bool:
        """Close the page behind the run's last iteration; whether it has everything. A warning says where it has not."""
        self._ending = status
        self.update()
        complete = self.settle()
        self.stop()
        if complete:
            return True
        log.warning(
            "MLflow at %s lacks a part of run %s (%s). The store has everything; write it to MLflow once that answers: "
            "roundhouse runs track %s",
            masked_text(self._uri),
            self._run.run_id,
            self._reason,
            self._run.run_id,
        )
        return False

    def _gave_up(self) -> bool:
        return self._failures > 0 and not self._ending

    def _post(self, job: Callable[[MlflowRun], None]) -> None:
        self._posted.append(job)
        with self._changed:
            self._changed.notify_all()

    def _follow(self) -> None:
        while not (self._stopped or (self._ending and self._answered >= self._asked)):
            with self._changed:
                if self._failures:
                    self._pause(PAUSES[min(self._failures, len(PAUSES)) - 1])
                else:
                    self._changed.wait_for(lambda: self._asked > self._answered or self._posted or self._stopped)
                asked = self._asked
            if self._stopped:
                return
            try:
                ending = self._ending
                page = self._page = self._page or mlflow.open_mlflow_run(self._run, self._uri)
                for iteration in page.missing_iterations():
                    page.log_iteration(iteration)
                    self._written += 1
                while self._posted:
                    self._posted.popleft()(page)
                    self._written += 1
                if ending:
                    page.finish(ending)
                else:
                    page.monitor_system()
            except Exception as error:  # noqa: BLE001 (border of the requests: a view may break in any way)
                self._reason = masked_text(str(error))
                if self._failures == 0:
                    log.warning(
                        "MLflow at %s does not answer (%s): the run continues, the store keeps everything, and what is "
                        "missing is written once it answers",
                        masked_text(self._uri),
                        self._reason,
                    )
                with self._changed:
                    self._failures += 1
                    self._changed.notify_all()
            else:
                self._failures = 0
                with self._changed:
                    self._answered = asked
                    self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        """Wait; no longer than until there is more to write."""
        asked = self._asked
        self._changed.wait_for(lambda: self._asked > asked or self._stopped, seconds)


class MetricsSink(Protocol):
    """What `tracking.sinks` names; it is made with the run."""

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an iteration, by the names of docs/metrics.md. After a restart all iterations come again, oldest
        first: one that the sink has is to be passed over or replaced."""
        ...


class JsonLinesSink:
    """A line of JSON an iteration: `{"iteration": 3, "reward/mean": 0.5, …}`. A last line that a kill tore is written again."""

    def __init__(self, run: Run) -> None:
        self.file = Path(run.config.infra.state) / "metrics" / f"{run.run_id}.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()
        whole = self.file.read_bytes().rpartition(b"\n")
        os.truncate(self.file, len(whole[0] + whole[1]))
        self._written = {json.loads(line)["iteration"] for line in whole[0].splitlines()}

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration not in self._written:
            with self.file.open("a") as file:
                file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
            self._written.add(iteration)


class Sinks:
    """The sinks of a run beside MLflow, for the time that a process works on it."""

    def __init__(self, run: Run) -> None:
        """
        Raises:
            ConfigError: a class cannot be found.
        """
        names = [name for name in run.config.tracking.sinks if name != "mlflow"] if run.config.tracking.enabled else []
        self._run, self._next = run, run.first_version
        classes: list[Callable[[Run], MetricsSink]] = []
        for name in names:
            found: Any = JsonLinesSink if name == "json_lines" else load_class(name, object, "tracking.sinks")
            if not callable(getattr(found, "log_iteration", None)):
                raise ConfigError(f"tracking.sinks names {name!r}, which does not define log_iteration.")
            classes.append(found)
        self._sinks: list[MetricsSink] = []
        for name, sink in zip(names, classes, strict=True):
            try:
                self._sinks.append(sink(run))
            except Exception as error:  # noqa: BLE001 (border of the sink's own code)
                log.warning("tracking.sinks: %s cannot be opened, and this run goes on without it: %r", name, error)

    def update(self) -> None:
        """Give them what has been reported since."""
        while self._sinks and self._run.is_reported(self._next):
            metrics = iteration_metrics(iteration_manifests(self._run, self._next))
            for sink in self._sinks:
                try:
                    sink.log_iteration(self._next, metrics)
                except Exception as error:  # noqa: BLE001 (border of the sink's own code)
                    log.warning("%s did not take iteration %d: %r", type(sink).__name__, self._next, error)
            self._next += 1


def catch_up(run: Run) -> bool:
    """Write to MLflow what it lacks of a run that no process works on; whether it has everything then."""
    if (tracker := open_tracker(run)) is None:
        return False
    summary = run.summary()
    complete = tracker.finish("KILLED" if summary is None else "FINISHED")
    if summary is not None:
        run.write_summary(summary | {"mlflow_complete": complete, "mlflow_url": tracker.url})
    return complete


def open_tracker(run: Run) -> Tracker | None:
    """The run's tracker; None when tracking is off or no server is named (with a warning)."""
    if not run.config.tracking.in_mlflow:
        return None
    uri = mlflow.server_of(run)
    if uri is None:
        log.warning("no MLflow server: set tracking.uri or MLFLOW_TRACKING_URI, or start one with `roundhouse up`")
        return None
    return Tracker(run, uri)


_COLORS = {
    StageKind.COLLECT: "#4c78a8",
    StageKind.TRAIN: "#f58518",
    StageKind.REFIT: "#54a24b",
    StageKind.VALIDATE: "#b279a2",
    StageKind.CHECKPOINT: "#9d755d",
    "orchestration": "#bab0ac",
}


def plot_run(run: Run, summary: dict[str, Any], file: Path) -> None:
    """Write the learning curve as a PNG of about 1400 x 560 pixels."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.6), dpi=100, width_ratios=(3, 2))
    _plot_reward(left, summary, run.first_version + 1)
    _plot_seconds(right, run, range(run.first_version + 1, summary["iterations"] + 1))
    figure.suptitle(f"{run.run_id}: {summary['environment']}, seed {run.config.seed}", fontsize=13)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _plot_reward(axes: Any, summary: dict[str, Any], first: int) -> None:
    nan = float("nan")  # a gap where an iteration was skipped
    rewards = [nan if reward is None else reward for reward in summary["reward_by_iteration"]]
    axes.plot(range(first, first + len(rewards)), rewards, color="#4c78a8", linewidth=1.6, label="training rollouts")
    evaluations = [each for each in summary["evaluation"]["all"] if each["reward_mean"] is not None]
    axes.errorbar(
        [evaluation["version"] for evaluation in evaluations],
        [evaluation["reward_mean"] for evaluation in evaluations],
        yerr=[1.96 * evaluation["reward_stderr"] for evaluation in evaluations],
        fmt="o",
        color="#e45756",
        capsize=4,
        label="held-out tasks (95 % interval)",
    )
    axes.set_xlabel("iteration")
    axes.set_ylabel("mean reward")
    axes.set_ylim(-0.02, max([1.02, *(reward for reward in rewards if reward == reward)]))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _plot_seconds(axes: Any, run: Run, numbers: range) -> None:
    manifests = [iteration_manifests(run, k) for k in numbers]
    bottom = [0.0] * len(numbers)
    for kind, color in _COLORS.items():
        if kind == "orchestration":
            heights = [
                m[StageKind.REPORT].metrics.get("overhead/orchestration", 0.0) if StageKind.REPORT in m else 0.0
                for m in manifests
            ]
        else:
            heights = [stage_seconds(m[kind]) if kind in m else 0.0 for m in manifests]
        axes.bar(numbers, heights, bottom=bottom, width=1.0, color=color, label=kind)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("iteration")
    axes.set_ylabel("seconds")
    axes.legend(loc="upper right", fontsize=8)
