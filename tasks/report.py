"""Tasks that show a run to a person: Prefect artifacts, MLflow, the summary and its plot."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
)
from prefect.exceptions import Pause

from roundhouse.activity import announce
from roundhouse.console import mean_text
from roundhouse.health.heartbeat import outcome_of
from roundhouse.stages import report as stage
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.report import iteration_page
from roundhouse.stages.trainer_home import trainer_home
from roundhouse.store.run import Run
from roundhouse.store.stage import Manifest, Reference, StageKind
from roundhouse.tracking.ended_runs import close_other_pages
from roundhouse.tracking.mlflow import PLOT
from roundhouse.tracking.sinks import Sinks
from roundhouse.tracking.tracker import PATIENCE_SECONDS, Tracker, catch_up, open_tracker, plot_run
from roundhouse.trajectories.records import as_markdown
from roundhouse_tasks.options import STAGE

log = logging.getLogger(__name__)

ARTIFACTS_SECONDS = 10.0
"""Longest wait at the end of a run for artifacts on their way to Prefect."""
INTERRUPTED_SECONDS = 5.0
"""Longest wait of an interrupted run for MLflow; `roundhouse.tracking.ended_runs` closes a page that it misses."""
QUIET_SECONDS = 1.0
"""Longest wait, before an iteration is shown, for the next one's rollouts or training to begin."""
_artifacts = ThreadPoolExecutor(1, "artifacts")
"""Makes and sends an iteration's artifacts and metrics: the next iteration need not wait for them."""
_at_work = threading.Event()
"""Set while a stage runs that asks Prefect for nothing. Between two iterations Prefect's server, one process on one core, makes
a flow run, and whatever else it is asked makes the run wait."""
_trackers: dict[str, Tracker | None] = {}
"""The tracker of each run this process works on, by run uid."""
_sinks: dict[str, Sinks] = {}
"""The other sinks, likewise."""
_opening = threading.Lock()
_linked: set[str] = set()
"""Runs with an MLflow page that this process has linked, by run uid."""


@contextmanager
def tracked(run: Run) -> Iterator[None]:
    """Let a background thread send the run to MLflow during a block, without making the block wait.

    The page shows how the block ends. A suspended or failed run lets the thread finish its writing; an interrupted one
    waits for a few seconds at most. Pages that a killed process left open are closed, too.
    """
    try:
        if (tracker := tracker_of(run)) is not None:
            tracker.post(lambda page: close_other_pages(run))
        _sinks[run.uid] = Sinks(run)
        yield
        _await_artifacts(run)
    except BaseException as error:
        is_quick = not isinstance(error, Exception | Pause)
        if not is_quick:
            _await_artifacts(run)
        tracker = opened_tracker(run)
        if tracker is not None and not (is_quick and tracker.url is None):  # else MLflow is not up yet
            tracker.close(outcome_of(error), INTERRUPTED_SECONDS if is_quick else PATIENCE_SECONDS)
        raise
    finally:
        if (sinks := _sinks.pop(run.uid, None)) is not None:
            sinks.close()
        if (tracker := _trackers.pop(run.uid, None)) is not None:
            tracker.stop()


@task(name="report", task_run_name="report {iteration}", **STAGE)
def report_iteration(run: Run, iteration: int) -> Reference:
    """Close an iteration: its report in the store, which MLflow then follows, and artifacts in Prefect."""
    reference = stage.report_iteration(run, iteration)
    manifests = stage.iteration_manifests(run, iteration)
    if (tracker := tracker_of(run)) is not None:
        _link(run, tracker)
    _at_work.clear()
    sent = _artifacts.submit(copy_context().run, _show_iteration, run, iteration, manifests)
    sent.add_done_callback(partial(_log_failure, iteration))
    if StageKind.EVALUATE in manifests and run.config.tracking.enabled:
        evaluation = run.stage(iteration, StageKind.EVALUATE).reference()
        assert evaluation is not None, "its manifest is among the iteration's"
        rollouts = read_rollouts(evaluation)[: run.config.tracking.conversations]
        text = "\n\n".join(as_markdown(rollout) for rollout in rollouts)
        create_markdown_artifact(key=_key(run, "conversations"), markdown=text)
    announce("iteration", iteration=iteration, metrics=stage.iteration_metrics(manifests))
    return reference


@task(name="summary", task_run_name="summary", **STAGE)
def finish_run(run: Run) -> dict[str, Any]:
    """Write the plot and the summary, let the trainer go, and close the MLflow run."""
    trainer_home(run).release()
    summary = stage.summarize(run)
    with tempfile.TemporaryDirectory() as directory:
        picture = Path(directory) / PLOT
        plot_run(run, summary, picture)
        run.location.write(PLOT, picture.read_bytes())
    tracker = tracker_of(run)
    summary["mlflow_complete"] = None if tracker is None else tracker.finish()
    summary["mlflow_url"] = None if tracker is None else tracker.url
    if tracker is not None:
        _link(run, tracker)
    run.write_summary(summary)
    create_markdown_artifact(key=_key(run, "summary"), markdown=_summary_markdown(summary))
    return summary


def finished_summary(run: Run) -> dict[str, Any] | None:
    """Return the summary of a run that has made all its iterations or reached its target, after completing its MLflow
    page; None before."""
    summary = run.summary()
    if summary is None:
        return None
    if summary["iterations"] < run.config.iterations and not stage.reaches_target(run, summary["iterations"]):
        return None
    if summary.get("mlflow_complete") is False and catch_up(run, "finished"):
        summary = run.summary()
    return summary


def opened_tracker(run: Run) -> Tracker | None:
    """Return the run's page in MLflow if this process has opened it, for callers that must not open a second one."""
    return _trackers.get(run.uid)


def tracker_of(run: Run) -> Tracker | None:
    """Return the run's page in MLflow, or None."""
    with _opening:
        if run.uid not in _trackers:
            _trackers[run.uid] = open_tracker(run)
        return _trackers[run.uid]


def show_reported(run: Run) -> None:
    """Send the views of reported iterations. Called when the next one's rollouts or training begin, or none will."""
    if not _at_work.is_set():
        _at_work.set()
        if (tracker := opened_tracker(run)) is not None:
            tracker.update()


def _show_iteration(run: Run, iteration: int, manifests: dict[str, Manifest]) -> None:
    _at_work.wait(QUIET_SECONDS)
    show_reported(run)
    if (sinks := _sinks.get(run.uid)) is not None:
        sinks.update()
    create_progress_artifact(
        key=_key(run, "progress"),
        progress=100 * iteration / run.config.iterations,
        description=f"iteration {iteration} of {run.config.iterations}",
    )
    create_markdown_artifact(
        key=_key(run, "iteration"),
        markdown=iteration_page(run, iteration, manifests),
        description=f"Iteration {iteration}",
    )


def _await_artifacts(run: Run) -> None:
    show_reported(run)
    with suppress(TimeoutError):
        _artifacts.submit(lambda: None).result(ARTIFACTS_SECONDS)


def _log_failure(iteration: int, sent: Future[None]) -> None:
    """Log a page that could not be made, without failing the run: the store has all its data."""
    if (error := sent.exception()) is not None:
        log.warning("Prefect did not store the artifacts of iteration %d: %s", iteration, error)


def _link(run: Run, tracker: Tracker) -> None:
    """Log MLflow's page once, when it exists."""
    if tracker.url is not None and run.uid not in _linked:
        create_link_artifact(key=_key(run, "mlflow"), link=tracker.url, link_text=f"MLflow run of {run.run_id}")
        announce("tracking", url=tracker.url)
        _linked.add(run.uid)


def _summary_markdown(summary: dict[str, Any]) -> str:
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    lines = [f"# {summary['run_id']}", ""]
    if before and after:
        lines += [f"Held-out reward **{mean_text(before)} → {mean_text(after)}**", ""]
    lines += ["| stage | seconds |", "| --- | ---: |"]
    lines += [f"| {kind} | {seconds:.1f} |" for kind, seconds in summary["stage_seconds"].items()]
    lines += ["", "| outcome | rollouts |", "| --- | ---: |"]
    lines += [f"| {name} | {count} |" for name, count in summary["ledger"].items()]
    return "\n".join(lines)


def _key(run: Run, name: str) -> str:
    """An artifact key: Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run.run_id}-{name}")
