"""Tracking of a run: a thread that writes the store's missing data to MLflow.

Invariant: a working run never waits for MLflow. The server may not be up yet, hang, answer with errors or die: the
thread retries at every new iteration and at least once a minute, and writes everything that is missing. At its end, a
run waits while data is still being written, and stops waiting `PATIENCE_SECONDS` after the last write.

    run      ── update() ──────────── update() ──── finish() … the summary reports whether MLflow has everything
    thread        └ refused ┄ again ┄ refused ┄ again ─ iterations 0 to 7 ─ closed
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roundhouse.config.secrets import masked_text
from roundhouse.health.heartbeat import record_closed_page, state_of
from roundhouse.stages.report import iteration_manifests, stage_seconds
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind
from roundhouse.tracking import mlflow
from roundhouse.tracking.ended_runs import STATUS_OF
from roundhouse.tracking.mlflow import RUNNING, MlflowRun

PATIENCE_SECONDS = 30.0
"""Time that the end of a run waits for a page that does not grow: as long as MLflow needs for a restart."""
PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds between two attempts at a server that does not answer; the last is repeated."""
POSTED = 1000
"""So many gauges and tags are kept for a server that is away: one a minute for most of a day."""

POST_ATTEMPTS = 3
"""The server may die during a tag. A tag that it refuses must not hold back the page for ever."""

log = logging.getLogger(__name__)


class Tracker:
    """Writer of one run's MLflow page, while a process works on the run."""

    def __init__(self, run: Run, uri: str) -> None:
        self._run = run
        self._uri = uri
        self._page: MlflowRun | None = None
        self._posted: deque[Callable[[MlflowRun], None]] = deque(maxlen=POSTED)
        self._attempts = 0
        """Attempts at the first of them."""
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
        """Notify the tracker of new data in the store."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def tag(self, tags: dict[str, str]) -> None:
        """Set tags of the page."""
        self.post(lambda page: page.tag(tags))

    def log_gauges(self, gauges: dict[str, float]) -> None:
        """Log numbers with the present time."""
        now = time.time()
        self.post(lambda page: page.log_gauges(gauges, now))

    def follow_store(self) -> None:
        """Notify the tracker of an answered promotion."""
        self.post(MlflowRun.follow_store)

    def settle(self) -> bool:
        """Wait until the page has all data of the store, and return whether it has.

        Return False if nothing was written for `PATIENCE_SECONDS`, or, before the run's end, if a write failed.
        """
        with self._changed:
            while self._answered < self._asked:
                before = self._written
                self._changed.wait_for(lambda: self._answered >= self._asked or self._gave_up(), PATIENCE_SECONDS)
                if self._written == before or self._gave_up():
                    break
            return self._answered >= self._asked

    def stop(self) -> None:
        """Stop after the present write."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def finish(self, status: str = "FINISHED") -> bool:
        """Close the page after the run's last iteration and return whether it has everything. Warn if it has not."""
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

    def close(self, state: str, seconds: float) -> None:
        """Close the page of a run that ends early, and let it show the state (`roundhouse.health.heartbeat.State`).

        Wait for at most `seconds`, and not for a server that does not answer: `ended_runs` closes the page later.
        """
        with self._changed:
            if self._stopped:
                return
            self._ending = STATUS_OF[state]
            self._asked += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answered >= self._asked or self._failures > 0, seconds)
            is_closed = self._answered >= self._asked
        self.stop()
        if is_closed:
            record_closed_page(self._run.location, self._uri)

    def _gave_up(self) -> bool:
        return self._failures > 0 and not self._ending

    def post(self, job: Callable[[MlflowRun], None]) -> None:
        """Run a job in the tracker's thread as soon as the server answers. A job that raises is repeated, `POST_ATTEMPTS`
        times in all; of many waiting jobs, the newest `POSTED` are kept.
        """
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
                requests = self._asked
            if self._stopped:
                return
            try:
                ending = self._ending
                page = self._page = self._page or mlflow.open_mlflow_run(self._run, self._uri)
                page.restore()
                for iteration in page.missing_iterations():
                    page.log_iteration(iteration)
                    self._written += 1
                self._run_posted(page)
                if ending:
                    page.finish(ending)
                else:
                    page.monitor_system()
            except Exception as error:  # noqa: BLE001 (border of the requests: a view may break in any way)
                self._reason = masked_text(str(error))
                if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                    self._page = None  # it was deleted for good: the next try makes another one
                if self._failures == 0:
                    log.warning(
                        "MLflow at %s does not answer (%s): the run continues, and missing metrics are written from the "
                        "store when it answers",
                        masked_text(self._uri),
                        self._reason,
                    )
                with self._changed:
                    self._failures += 1
                    self._changed.notify_all()
            else:
                self._failures = 0
                with self._changed:
                    self._answered = requests
                    self._changed.notify_all()

    def _run_posted(self, page: MlflowRun) -> None:
        while self._posted:
            job = self._posted.popleft()
            self._attempts += 1
            try:
                job(page)
            except Exception:
                if self._attempts < POST_ATTEMPTS and len(self._posted) < POSTED:
                    self._posted.appendleft(job)
                else:
                    self._attempts = 0
                raise
            self._attempts = 0
            self._written += 1

    def _pause(self, seconds: float) -> None:
        """Wait; no longer than until there is more to write."""
        requests = self._asked
        self._changed.wait_for(lambda: self._asked > requests or self._stopped, seconds)


def catch_up(run: Run, state: str | None = None) -> bool:
    """Write a run's missing data to MLflow and return whether it then has everything.

    Args:
        state: state that the page shows; by default the run's.
    """
    if (tracker := open_tracker(run)) is None:
        return False
    status = STATUS_OF.get(state or state_of(run), RUNNING)
    complete = tracker.finish(status)
    if complete and status != RUNNING:
        record_closed_page(run.location, str(mlflow.server_of(run)))
    if (summary := run.summary()) is not None:
        run.write_summary(summary | {"mlflow_complete": complete, "mlflow_url": tracker.url})
    return complete


def open_tracker(run: Run) -> Tracker | None:
    """Return the run's tracker. Return None if tracking is off, or no server is named (with a warning)."""
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
    nan = float("nan")  # a gap for a skipped iteration
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
