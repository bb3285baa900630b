"""Run a training step as a Kubernetes Job, and bring back what it leaves in the store.

Invariant: the Job does what the process of `train_process` does, by the same command on the same spec, elsewhere.
The name of the Job is made of all that the step depends on, so a stage that is tried again finds the Job that is under way,
or the one that has finished.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable

import pyarrow as pa

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.train_service import ProcessService
from roundhouse.errors import RoundhouseError
from roundhouse.infra.kubernetes import train_job
from roundhouse.infra.kubernetes.cluster import connect
from roundhouse.infra.kubernetes.job import RunJobs
from roundhouse.infra.kubernetes.names import StageIdentity
from roundhouse.infra.kubernetes.train_job import TrainJob
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind
from roundhouse.training.service.job_entry import read_error
from roundhouse.training.service.one_shot import StepSpec, TrainStepResult, read_result


def run_in_job(
    run: Run, spec: StepSpec, infra: KubernetesInfra, service: ProcessService, say: Callable[[str], None]
) -> tuple[TrainStepResult, pa.Table]:
    """Run the step; `spec.report` and `spec.cache` are set to places that the pods have.

    Args:
        say: given the log of the first pod and what the Job waits for, line by line.

    Raises:
        DataError, ConfigError, StoreError: as the step raised them, or the Job cannot work.
        InfraError: the cluster, a node or a pod failed; a new attempt may succeed.
    """
    plan = plan_of(run, spec, infra, service)

    def prepare(number: int) -> None:
        places: dict[str, object] = {"report": plan.report(number), "cache": train_job.CACHE}
        if infra.trainer.cache_claim:
            places |= {"node_cache": train_job.NODE_CACHE, "node_cache_bytes": int(infra.trainer.cache_gib * 2**30)}
        placed = spec.model_copy(update=places)
        Location(plan.report(number)).write("spec.json", placed.model_dump_json().encode())

    def told(number: int) -> RoundhouseError | None:
        return read_error(Location(plan.report(number)))

    cluster, began = connect(infra), time.monotonic()
    try:
        with RunJobs(cluster, infra.namespace, run.uid) as jobs:
            number = jobs.run(plan, say, prepare, told)
    finally:
        cluster.close()
    result, columns = read_result(Location(plan.report(number)))
    figures = {
        "kubernetes_calls": float(cluster.calls.total()),
        # pods, images, imports and the cluster itself; negative for a Job that was found finished
        "kubernetes_seconds": time.monotonic() - began - result.seconds["total"],
    }
    return result.model_copy(update={"metrics": result.metrics | figures}), columns


def plan_of(run: Run, spec: StepSpec, infra: KubernetesInfra, service: ProcessService) -> TrainJob:
    """The step as a Job: pure."""
    tree = spec.model_dump(
        mode="json",
        exclude={
            "attempt": True,
            "report": True,
            "cache": True,
            "node_cache": True,
            "node_cache_bytes": True,
            "train": {"service": True},
        },
    )
    # sorted: a reference that was read back has its counts in another order than one that was just committed
    depends = json.dumps(tree, sort_keys=True)
    identity = StageIdentity(
        run_id=run.run_id,
        run_uid=run.uid,
        iteration=spec.iteration,
        stage="train",
        digest=hashlib.sha256(depends.encode()).hexdigest()[:32],
    )
    reports = (run.stage(spec.iteration, StageKind.TRAIN).location / "jobs").uri
    return TrainJob(identity, infra, service, reports=reports, store=Location(run.config.store).uri)
