"""MLflow as a view of the store: one MLflow run a training run, found again by the run's uid.

Invariant: what MLflow shows of an iteration comes from the committed manifests, and each iteration is logged once. After a
crash, or after MLflow was away, the missing iterations are logged from the store; no point is logged twice. Tracking never
stops a run: a server that does not answer costs a warning.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from roundhouse.config.loading import config_yaml, flatten
from roundhouse.config.secrets import masked_text
from roundhouse.stages.report import iteration_manifests, iteration_metrics
from roundhouse.store.manifest import Manifest, Reference
from roundhouse.store.run import Run
from roundhouse.tracking.registry import UID_TAG, register_checkpoint
from roundhouse.tracking.traces import TraceWriter
from roundhouse.trajectories.records import Rollout

ITERATION_METRIC = "iteration"
"""Logged with every iteration; its history tells which iterations MLflow has."""

SYSTEM_METRICS_SECONDS = 10.0

P = ParamSpec("P")

log = logging.getLogger(__name__)


def _costs_a_warning(method: Callable[P, None]) -> Callable[P, None]:
    """A call that a server which is away cannot break: what it would have shown stays in the store. Its time is counted."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        from mlflow.exceptions import MlflowException

        began = time.monotonic()
        try:
            method(*args, **kwargs)
        except MlflowException as error:
            log.warning("MLflow: %s was not logged (%s); the store has it", method.__name__.removeprefix("log_"), error)
        finally:
            tracker = args[0]
            assert isinstance(tracker, Tracker)
            tracker.seconds += time.monotonic() - began

    return call


class Tracker:
    """The MLflow run of a training run."""

    def __init__(self, client: Any, run: Run, experiment_id: str, mlflow_run_id: str, url: str) -> None:
        self._client = client
        self._run = run
        self._traces = TraceWriter(client, experiment_id, mlflow_run_id)
        self._monitor = _system_monitor(mlflow_run_id) if run.config.tracking.system_metrics else None
        self.mlflow_run_id = mlflow_run_id
        self.url = url
        """Page of the run."""
        self.seconds = 0.0
        """Wall time that the run has waited for these calls."""
        self._logged = {int(point.step) for point in client.get_metric_history(mlflow_run_id, ITERATION_METRIC)}

    @_costs_a_warning
    def log_missing_iterations(self, newest: int) -> None:
        """Log every complete iteration up to `newest` that MLflow does not have yet."""
        for iteration in range(self._run.first_version, newest + 1):
            if iteration not in self._logged:
                self._log_iteration(iteration)

    @_costs_a_warning
    def log_artifact(self, file: Path, folder: str = "") -> None:
        """Attach a local file to the run."""
        self._client.log_artifact(self.mlflow_run_id, str(file), folder or None)

    @_costs_a_warning
    def log_text(self, text: str, name: str) -> None:
        """Attach a text under a name."""
        self._client.log_text(self.mlflow_run_id, text, name)

    @_costs_a_warning
    def log_traces(self, rollouts: Sequence[Rollout], iteration: int) -> None:
        """Show rollouts of an iteration as traces; those that are there already are left."""
        self._traces.write(rollouts, iteration)

    @_costs_a_warning
    def register(self, version: int) -> None:
        """Register an evaluated checkpoint as a model version, and let the alias follow the store's promotion."""
        register_checkpoint(self._client, self._run, version, self.mlflow_run_id)

    @_costs_a_warning
    def tag(self, tags: dict[str, str]) -> None:
        """Set tags of the run."""
        for name, value in tags.items():
            self._client.set_tag(self.mlflow_run_id, name, value)

    def log_gauges(self, gauges: dict[str, float]) -> None:
        """Log numbers of this moment; their step is the second since the run was created."""
        from mlflow.entities import Metric

        now = time.time()
        step = int(now - self._run.created_at)
        points = [Metric(name, value, int(now * 1000), step) for name, value in gauges.items()]
        self._client.log_batch(self.mlflow_run_id, metrics=points)

    def finish(self, status: str = "FINISHED") -> None:
        """Close the MLflow run (FINISHED, FAILED or KILLED); opening it again makes it RUNNING."""
        if self._monitor is not None:
            self._monitor.finish()
        self._client.set_terminated(self.mlflow_run_id, status)

    def _log_iteration(self, iteration: int) -> None:
        from mlflow.entities import Metric

        manifests = iteration_manifests(self._run, iteration)
        if not manifests:
            return
        values = iteration_metrics(manifests) | {ITERATION_METRIC: float(iteration)}
        stamp = int(max(manifest.finished_at for manifest in manifests.values()) * 1000)
        self._log_datasets(iteration, manifests)
        points = [Metric(name, float(value), stamp, iteration) for name, value in values.items()]
        self._client.log_batch(
            self.mlflow_run_id, metrics=points
        )  # last: the mark that the iteration is logged is in it
        self._logged.add(iteration)

    def _log_datasets(self, iteration: int, manifests: dict[str, Manifest]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        found = []
        for kind, context in (("collect", "rollouts"), ("validate", "sequences")):
            reference = self._run.stage(iteration, kind).reference()
            if kind in manifests and reference is not None:
                found.append((f"{context}-{iteration:06d}", reference, context))
        if "validate" in manifests and (collected := manifests["validate"].inputs.get("dataset")) is not None:
            found.append(("-".join(collected.uri.split("/")[-2:]), collected, "offline rollouts"))
        inputs = [
            DatasetInput(
                Dataset(
                    name=name,
                    digest=reference.digest[:36],
                    source_type="s3" if reference.uri.startswith("s3://") else "local",
                    source=_source(reference),
                ),
                [InputTag("mlflow.data.context", context)],
            )
            for name, reference, context in found
        ]
        if inputs:
            self._client.log_inputs(self.mlflow_run_id, inputs)


def open_tracker(run: Run) -> Tracker | None:
    """Find or create the MLflow run; None when tracking is off or the server does not answer (with a warning)."""
    tracking = run.config.tracking
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not tracking.enabled:
        return None
    if uri is None:
        log.warning("no MLflow server: set tracking.uri or MLFLOW_TRACKING_URI, or start one with `roundhouse up`")
        return None
    # A server that is away must not hold up a run: few, short attempts.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    mlflow.set_tracking_uri(uri)  # traces know no other way
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each version and each monitor
    client = MlflowClient(uri)
    try:
        experiment_id = _experiment(client, tracking.experiment)
        mlflow_run_id = _find_or_create(client, experiment_id, run)
        url = f"{masked_text(uri).rstrip('/')}/#/experiments/{experiment_id}/runs/{mlflow_run_id}"
        return Tracker(client, run, experiment_id, mlflow_run_id, url)
    except MlflowException as error:
        told = masked_text(uri), masked_text(str(error))
        log.warning("MLflow at %s does not answer (%s): going on without; the store keeps everything", *told)
        return None


def _system_monitor(mlflow_run_id: str) -> Any:
    """A running thread that logs the machine's load; it continues the curve of an earlier start."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(mlflow_run_id, sampling_interval=SYSTEM_METRICS_SECONDS, resume_logging=True)
    monitor.start()
    return monitor


def _experiment(client: Any, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    return experiment.experiment_id if experiment is not None else client.create_experiment(name)


def _find_or_create(client: Any, experiment_id: str, run: Run) -> str:
    from mlflow.entities import Param

    found = client.search_runs([experiment_id], f"tags.`{UID_TAG}` = '{run.uid}'", max_results=1)
    if found:
        mlflow_run_id = found[0].info.run_id
        client.update_run(mlflow_run_id, status="RUNNING")
        return mlflow_run_id
    tags = {UID_TAG: run.uid, "roundhouse.run_id": run.run_id, "roundhouse.code_version": run.code_version}
    if run.parent is not None:
        tags |= {f"roundhouse.parent.{key}": str(value) for key, value in flatten(run.parent.model_dump()).items()}
    created = client.create_run(experiment_id, int(time.time() * 1000), tags, run.run_id)
    params = [Param(key, str(value)[:500]) for key, value in flatten(run.config.model_dump(mode="json")).items()]
    for start in range(0, len(params), 100):
        client.log_batch(created.info.run_id, params=params[start : start + 100])
    client.log_text(created.info.run_id, config_yaml(run.config), "config.yaml")
    return created.info.run_id


def _source(reference: Reference) -> str:
    return json.dumps({"uri": reference.uri})
