"""MLflow as a view of the store: one MLflow run per training run, found by the run's uid.

Invariant: all data comes from committed stages, and each iteration is logged once: its metrics, which carry the mark,
are written last. An interrupted call is therefore repeated as a whole, and the server may be new and empty. These calls
wait for the server and raise its errors; `roundhouse.tracking.tracker` keeps them from delaying a run.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roundhouse.config.loading import config_yaml, flatten
from roundhouse.config.secrets import masked_text
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.report import iteration_manifests, iteration_metrics
from roundhouse.store.location import NotFound
from roundhouse.store.run import Run
from roundhouse.store.stage import Manifest, StageKind
from roundhouse.tracking.traces import UID_TAG, TraceWriter, delete_versions, follow_store, register_checkpoint
from roundhouse.trajectories.records import as_markdown

log = logging.getLogger(__name__)

RUNNING = "RUNNING"
"""MLflow's status of a run at work."""
DELETED = "deleted"
"""MLflow's life cycle stage of deleted objects."""
ITERATION_METRIC = "iteration"
"""Logged with every iteration; its history lists the iterations that MLflow has."""
PLOT = "learning-curve.png"
DESCRIBED_TAG = "roundhouse.described"
CLASSIC_VIEW = ("mlflow.experimentKind", "custom_model_development")
"""Tag of an experiment: MLflow's page opens on runs and curves. Without it, traces make it open as the page of a GenAI app."""
FIRST_LOOK = (
    "evaluation/reward/mean",
    "reward/mean",
    "train/gen_kl_error",
    "train/clip_fraction",
    "rollout/failed_rate",
    "time/iteration",
)
"""Metrics to show first: the columns of MLflow's table of runs."""
VIEW_KEY = "roundhouse"
"""Names the columns of the experiment's table: its address ends with `?viewStateShareKey=roundhouse`."""
VIEW = (
    f"mlflow.sharedViewState.{VIEW_KEY}",
    json.dumps({"selectedColumns": [f"metrics.`{name}`" for name in FIRST_LOOK]}),
)
"""Tag of an experiment: what MLflow's page keeps when a person shares a view of the table. By itself it shows no metric."""

SYSTEM_METRICS_SECONDS = 10.0
LONGEST_NAME = 250
"""Characters that MLflow takes in the name of a metric or parameter."""


class MlflowRun:
    """The MLflow run of a training run."""

    def __init__(self, client: Any, run: Run, experiment_id: str, mlflow_run_id: str, url: str) -> None:
        self._client = client
        self._run = run
        self._traces = TraceWriter(client, experiment_id, mlflow_run_id, run.uid)
        self._monitor: Any = None
        self.mlflow_run_id = mlflow_run_id
        self.url = url
        """Page of the run."""
        self._logged = {int(point.step) for point in client.get_metric_history(mlflow_run_id, ITERATION_METRIC)}

    def missing_iterations(self) -> list[int]:
        """Iterations that are complete in the store, their report included, and not in MLflow."""
        newest = self._run.latest_checkpoint()
        iterations = [] if newest is None else range(self._run.first_version, newest.policy_version + 1)
        return [k for k in iterations if k not in self._logged and self._run.is_reported(k)]

    def log_missing_iterations(self) -> None:
        """Log all of them, oldest first."""
        for iteration in self.missing_iterations():
            self.log_iteration(iteration)

    def finish(self, status: str = "FINISHED") -> None:
        """Log missing data and close the MLflow run (FINISHED, FAILED or KILLED). With RUNNING, which opening it sets,
        leave it open: another process works on the run."""
        self.log_missing_iterations()
        self.follow_store()
        try:
            picture = self._run.location.read(PLOT)
        except NotFound:
            picture = None
        if picture is not None:
            with tempfile.TemporaryDirectory() as directory:
                file = Path(directory) / PLOT
                file.write_bytes(picture)
                self._client.log_artifact(self.mlflow_run_id, str(file))
        if self._monitor is not None:
            self._monitor.finish()
        if status != RUNNING:
            self._client.set_terminated(self.mlflow_run_id, status)

    def follow_store(self) -> None:
        """Update the registered model's versions from the store."""
        follow_store(self._client, self._run)

    def monitor_system(self) -> None:
        """Log the machine's load from a thread of MLflow's, which ends at the first call that fails; it continues the curve."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        if not self._run.config.tracking.system_metrics or (
            self._monitor is not None and self._monitor._process.is_alive()
        ):
            return
        self._monitor = SystemMetricsMonitor(
            self.mlflow_run_id, sampling_interval=SYSTEM_METRICS_SECONDS, resume_logging=True
        )
        self._monitor.start()

    def restore(self) -> None:
        """Take the run and its experiment out of MLflow's trash.

        Raises:
            MlflowException: MLflow does not have them any more, or does not answer.
        """
        page = self._client.get_run(self.mlflow_run_id)
        if restore_experiment(self._client, self._client.get_experiment(page.info.experiment_id)):
            page = self._client.get_run(self.mlflow_run_id)  # MLflow may have restored it, too
        restore_run(self._client, page)

    def tag(self, tags: dict[str, str]) -> None:
        """Set tags of the run."""
        for name, value in tags.items():
            self._client.set_tag(self.mlflow_run_id, name, value)

    def log_gauges(self, gauges: dict[str, float], at: float) -> None:
        """Log numbers of a moment; their step is its second since the run was created."""
        step = int(at - self._run.created_at)
        self._client.log_batch(self.mlflow_run_id, metrics=_points(gauges, int(at * 1000), step))

    def log_iteration(self, iteration: int) -> None:
        manifests = iteration_manifests(self._run, iteration)
        values = iteration_metrics(manifests) | {ITERATION_METRIC: float(iteration)}
        stamp = int(max(manifest.finished_at for manifest in manifests.values()) * 1000)
        self._log_datasets(iteration, manifests)
        if StageKind.EVALUATE in manifests:
            evaluation = self._run.stage(iteration, StageKind.EVALUATE).reference()
            assert evaluation is not None, "its manifest was read a moment ago"
            rollouts = read_rollouts(evaluation)[: self._run.config.tracking.conversations]
            self._traces.write(rollouts, iteration)
            text = "\n\n".join(as_markdown(rollout) for rollout in rollouts)
            self._client.log_text(self.mlflow_run_id, text, f"conversations/version-{iteration:06d}.md")
            register_checkpoint(self._client, self._run, iteration, self.mlflow_run_id)
        # Last: the mark that the iteration is logged is in it
        self._client.log_batch(self.mlflow_run_id, metrics=_points(values, stamp, iteration))
        self._logged.add(iteration)

    def _log_datasets(self, iteration: int, manifests: dict[str, Manifest]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset_inputs = []
        for kind, context in (("collect", "rollouts"), ("validate", "sequences")):
            reference = self._run.stage(iteration, kind).reference()
            if kind in manifests and reference is not None:
                dataset_inputs.append((f"{context}-{iteration:06d}", reference, context))
        if (
            StageKind.VALIDATE in manifests
            and (collected := manifests[StageKind.VALIDATE].inputs.get("dataset")) is not None
        ):
            dataset_inputs.append(("-".join(collected.uri.split("/")[-2:]), collected, "offline rollouts"))
        inputs = [
            DatasetInput(
                Dataset(
                    name=name,
                    digest=reference.digest[:36],
                    source_type="s3" if reference.uri.startswith("s3://") else "local",
                    source=json.dumps({"uri": reference.uri}),
                ),
                [InputTag("mlflow.data.context", context)],
            )
            for name, reference, context in dataset_inputs
        ]
        if inputs:
            self._client.log_inputs(self.mlflow_run_id, inputs)


def mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Map names of metrics or parameters to names that MLflow accepts: it refuses a whole batch for one bad name.

    Characters other than letters, digits and `_-.: /` become `_`, and parts that are empty or only dots are removed. A
    changed name that collides with another, or is too long, ends with a digest of the whole name.
    """
    taken = {name: _taken(name) for name in names}
    names_by_original: dict[str, str] = {}
    alike = Counter(taken.values())
    for name, new in taken.items():
        if len(new) > LONGEST_NAME or (new != name and alike[new] > 1):
            new = f"{new[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        names_by_original[name] = new
    return names_by_original


def _taken(name: str) -> str:
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return re.sub(r"^\.\.+", "_", "/".join(part for part in parts if part.strip("."))) or "_"


def _points(values: Mapping[str, float], stamp: int, step: int) -> list[Any]:
    from mlflow.entities import Metric

    names = mlflow_names(values)
    return [Metric(names[name], float(value), stamp, step) for name, value in values.items()]


def server_of(run: Run) -> str | None:
    """Return the address of the run's tracking server, or None."""
    return run.config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")


def client_of(uri: str, *, writes_traces: bool = True) -> Any:
    """Return a client that fails fast if a server does not answer: few, short attempts.

    Args:
        writes_traces: also send this process's traces to the server.

    Raises:
        MlflowException: MLflow does not support the address.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    # Traces are written by the thread that asks for it: MLflow's own threads would be waited for when the process ends.
    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
    import mlflow
    from mlflow.tracking import MlflowClient

    if writes_traces:
        mlflow.set_tracking_uri(uri)  # traces know no other way
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs each version and each monitor
    return MlflowClient(uri)


def open_mlflow_run(run: Run, uri: str) -> MlflowRun:
    """Find or create the MLflow run. A deleted one, or one in a deleted experiment, is restored.

    Raises:
        MlflowException: the server does not answer, or refuses.
    """
    from mlflow.entities import ViewType

    client = client_of(uri)
    experiment = client.get_experiment_by_name(run.config.tracking.experiment)
    if experiment is not None:
        experiment_id = experiment.experiment_id
        restore_experiment(client, experiment)
    else:
        experiment_id = client.create_experiment(run.config.tracking.experiment)
        client.set_experiment_tag(experiment_id, *CLASSIC_VIEW)
        client.set_experiment_tag(experiment_id, *VIEW)
        table = f"[table of runs](#{_table_path(experiment_id)})"
        note = f"Runs of Roundhouse. The {table} shows what to look at first; docs/metrics.md explains every metric."
        client.set_experiment_tag(experiment_id, "mlflow.note.content", note)
    runs = client.search_runs([experiment_id], f"tags.`{UID_TAG}` = '{run.uid}'", ViewType.ALL, max_results=1)
    if runs:
        restore_run(client, runs[0])
        client.update_run(runs[0].info.run_id, status=RUNNING)
    else:
        tags = {UID_TAG: run.uid, "roundhouse.run_id": run.run_id, "roundhouse.code_version": run.code_version}
        runs = [client.create_run(experiment_id, int(run.created_at * 1000), tags, run.run_id)]
    mlflow_run_id = runs[0].info.run_id
    for name, value in run.config.tracking.labels.items():
        if runs[0].data.tags.get(name) != value:
            client.set_tag(mlflow_run_id, name, value)
    if DESCRIBED_TAG not in runs[0].data.tags:
        _describe(client, mlflow_run_id, run)
    url = f"{masked_text(uri).rstrip('/')}/#/experiments/{experiment_id}/runs/{mlflow_run_id}"
    return MlflowRun(client, run, experiment_id, mlflow_run_id, url)


def page_of(client: Any, run: Run) -> Any | None:
    """Return the MLflow run of a training run; None if it is missing or deleted."""
    if (experiment := client.get_experiment_by_name(run.config.tracking.experiment)) is None:
        return None
    pages = client.search_runs([experiment.experiment_id], f"tags.`{UID_TAG}` = '{run.uid}'", max_results=1)
    return pages[0] if pages else None


def restore_experiment(client: Any, experiment: Any) -> bool:
    """Restore a deleted experiment, to which nothing can be logged. Return whether it was deleted."""
    if experiment.lifecycle_stage != DELETED:
        return False
    client.restore_experiment(experiment.experiment_id)
    log.warning("MLflow's experiment %r was deleted, and is restored.", experiment.name)
    return True


def restore_run(client: Any, page: Any) -> None:
    """Restore a deleted run, to which nothing can be logged."""
    if page.info.lifecycle_stage == DELETED:
        client.restore_run(page.info.run_id)
        log.warning("MLflow's run %s was deleted, and is restored.", page.info.run_name)


def table_url(page_url: str) -> str:
    """Address of the table that has the run of a page, with the columns that matter."""
    address, _, path = page_url.partition("#")
    return f"{address}#{_table_path(path.split('/')[2])}"


def delete_from_mlflow(run: Run, uri: str) -> bool:
    """Delete the run's page, its traces, and the model versions that point to its checkpoints; whether there was a page.

    MLflow keeps a deleted page in its trash until `mlflow gc`.

    Raises:
        MlflowException: the server does not answer, or refuses.
    """
    client = client_of(uri)
    if (experiment := client.get_experiment_by_name(run.config.tracking.experiment)) is None:
        return False
    mine = f"tags.`{UID_TAG}` = '{run.uid}'"
    place = experiment.experiment_id
    while traces := client.search_traces(locations=[place], filter_string=mine, max_results=100, include_spans=False):
        client.delete_traces(place, trace_ids=[trace.info.trace_id for trace in traces])
    delete_versions(client, run)
    pages = client.search_runs([place], mine)
    for page in pages:
        client.delete_run(page.info.run_id)
    return bool(pages)


def _table_path(experiment_id: str) -> str:
    return f"/experiments/{experiment_id}/runs?viewStateShareKey={VIEW_KEY}"


def _describe(client: Any, mlflow_run_id: str, run: Run) -> None:
    """Write the facts about the whole run; its tag is written last, so an interrupted call is repeated as a whole."""
    from mlflow.entities import Param

    settings = flatten(run.config.model_dump(mode="json"))
    names = mlflow_names(settings)
    params = [Param(names[key], str(value)[:500]) for key, value in settings.items()]
    for start in range(0, len(params), 100):
        client.log_batch(mlflow_run_id, params=params[start : start + 100])
    client.log_text(mlflow_run_id, config_yaml(run.config), "config.yaml")
    place = run.location.uri.removeprefix("file://")
    note = (
        f"Training run `{run.run_id}` on `{run.config.environment.kind}`. Store: `{place}`. A step is an iteration. Look first "
        f"at {', '.join(f'`{name}`' for name in FIRST_LOOK)}; docs/metrics.md explains every metric. Rollouts by iteration: "
        f"`roundhouse view {run.run_id}`."
    )
    tags = {"mlflow.source.name": "roundhouse", "mlflow.source.type": "LOCAL", "mlflow.note.content": note}
    with contextlib.suppress(KeyError, OSError):  # a pod's user may lack a name
        tags["mlflow.user"] = getpass.getuser()
    if commit := re.search(r"\+g([0-9a-f]+)$", run.code_version):
        tags["mlflow.source.git.commit"] = commit[1]
    if run.parent is not None:
        tags |= {f"roundhouse.parent.{key}": str(value) for key, value in flatten(run.parent.model_dump()).items()}
    for name, value in (tags | {DESCRIBED_TAG: "true"}).items():
        client.set_tag(mlflow_run_id, name, value)


def tell_mlflow(run: Run, version: int) -> None:
    """Show the answer. A server that is away costs a warning: the alias follows with the next registration."""
    uri = server_of(run)
    if not run.config.tracking.in_mlflow or uri is None:
        return
    from mlflow.exceptions import MlflowException

    client = client_of(uri)
    try:
        if (page := page_of(client, run)) is not None:
            register_checkpoint(client, run, version, page.info.run_id)
    except MlflowException as error:
        log.warning("MLflow did not receive the answer about version %d (%s); the store has it", version, error)
