"""Tasks that show a run to a person: Prefect artifacts, MLflow, the summary and its plot."""

from __future__ import annotations

import re
import tempfile
import threading
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
)

from roundhouse.progress import announce
from roundhouse.stages import report as stage
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.iteration_page import iteration_page
from roundhouse.stages.train import release_trainer
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.tracking.mlflow import Tracker, open_tracker
from roundhouse.tracking.plot import plot_run
from roundhouse.trajectories.conversation import as_markdown
from tasks.options import STAGE

_trackers: dict[str, Tracker | None] = {}
"""The tracker of each run this process works on, by run uid."""
_opening = threading.Lock()
_counted: dict[str, float] = {}
"""By run uid, of the tracker's seconds those that stand in a report."""
_linked: set[str] = set()
"""Runs whose MLflow page this process has linked, by run uid."""


@task(name="link-tracking", task_run_name="link MLflow", **STAGE)
def link_tracking(run: Run) -> str | None:
    """Open the MLflow run, log what it misses, and link it from Prefect."""
    tracker = tracker_of(run)
    if tracker is None:
        return None
    latest = run.latest_checkpoint()
    if latest is not None:
        tracker.log_missing_iterations(latest.policy_version)
    _link(run, tracker)
    return tracker.url


@task(name="report", task_run_name="report {iteration}", **STAGE)
def report_iteration(run: Run, iteration: int) -> Reference:
    """Close an iteration: its report in the store, its numbers in MLflow, artifacts in Prefect."""
    reference = stage.report_iteration(run, iteration, _tracking_seconds(run))
    manifests = stage.iteration_manifests(run, iteration)
    tracker = tracker_of(run)
    if tracker is not None:
        tracker.log_missing_iterations(iteration)
        _link(run, tracker)
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
    if "evaluate" in manifests and tracker is not None:
        _log_conversations(run, iteration, tracker)
    announce("iteration", iteration=iteration, metrics=stage.iteration_metrics(manifests))
    return reference


@task(name="summary", task_run_name="summary", **STAGE)
def finish_run(run: Run) -> dict[str, Any]:
    """Write the summary and the plot, let the trainer go, and close the MLflow run."""
    release_trainer()
    summary = stage.summarize(run)
    tracker = tracker_of(run)
    summary["mlflow_url"] = None if tracker is None else tracker.url
    if tracker is not None:
        tracker.log_missing_iterations(run.config.iterations)  # a run killed behind its last report lacks that one
        _link(run, tracker)
    with tempfile.TemporaryDirectory() as directory:
        picture = Path(directory) / "learning-curve.png"
        plot_run(run, summary, picture)
        run.location.write("learning-curve.png", picture.read_bytes())
        if tracker is not None:
            tracker.log_artifact(picture)
            tracker.finish()
    run.write_summary(summary)
    create_markdown_artifact(key=_key(run, "summary"), markdown=_summary_markdown(summary))
    return summary


def opened_tracker(run: Run) -> Tracker | None:
    """The run's page in MLflow where this process has opened it already: for those who must not open a second one."""
    return _trackers.get(run.uid)


def tracker_of(run: Run) -> Tracker | None:
    """The run's page in MLflow; None where there is none."""
    with _opening:
        if run.uid not in _trackers:
            _trackers[run.uid] = open_tracker(run)
        return _trackers[run.uid]


def _tracking_seconds(run: Run) -> float | None:
    """How long MLflow's calls took since the report before; None where this process has made none."""
    if (tracker := opened_tracker(run)) is None:
        return None
    total = tracker.seconds
    since = total - _counted.get(run.uid, 0.0)
    _counted[run.uid] = total
    return since


def _link(run: Run, tracker: Tracker) -> None:
    """Say once where MLflow's page is."""
    if run.uid not in _linked:
        create_link_artifact(key=_key(run, "mlflow"), link=tracker.url, link_text=f"MLflow run of {run.run_id}")
        announce("tracking", url=tracker.url)
        _linked.add(run.uid)


def _log_conversations(run: Run, iteration: int, tracker: Tracker) -> None:
    rollouts = read_rollouts(_complete(run, iteration, "evaluate"))[: run.config.tracking.conversations]
    tracker.log_traces(rollouts, iteration)
    tracker.register(iteration)
    text = "\n\n".join(as_markdown(rollout) for rollout in rollouts)
    tracker.log_text(text, f"conversations/version-{iteration:06d}.md")
    create_markdown_artifact(key=_key(run, "conversations"), markdown=text)


def _complete(run: Run, iteration: int, kind: str) -> Reference:
    reference = run.stage(iteration, kind).reference()
    if reference is None:
        raise ValueError(f"stage {kind} of iteration {iteration} is not complete")
    return reference


def _summary_markdown(summary: dict[str, Any]) -> str:
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    lines = [f"# {summary['run_id']}", ""]
    if before and after:
        lines += [f"Held-out reward **{before['reward_mean']:.3f} → {after['reward_mean']:.3f}**", ""]
    lines += ["| stage | seconds |", "| --- | ---: |"]
    lines += [f"| {kind} | {seconds:.1f} |" for kind, seconds in summary["stage_seconds"].items()]
    lines += ["", "| outcome | rollouts |", "| --- | ---: |"]
    lines += [f"| {name} | {count} |" for name, count in summary["ledger"].items()]
    return "\n".join(lines)


def _key(run: Run, name: str) -> str:
    """An artifact key: Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run.run_id}-{name}")
