"""Workers of shards that are Jobs of a cluster.

Invariant: for one shard at most one Job is under way, also when the flow dies and comes back: its name is made of all that the
shard depends on, so it is found and waited for. Jobs that this stage began and does not want any more (another plan, other
settings) are deleted before one is created. Two watches tell of all Jobs of the stage, however many there are.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from roundhouse.activity import ACTIVITY
from roundhouse.collection.shard_worker import finished_in
from roundhouse.collection.shard_workers import ShardTask
from roundhouse.collection.shards import REPORT
from roundhouse.config.distribution import JobShards
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.errors import RoundhouseError
from roundhouse.infra.kubernetes.cluster import connect
from roundhouse.infra.kubernetes.job import GONE_SECONDS, RunJobs, Unwanted
from roundhouse.infra.kubernetes.names import StageIdentity, dns_label
from roundhouse.infra.kubernetes.shard_job import PLACE, ShardJob
from roundhouse.launch.child_process import Stopped
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run
from roundhouse.training.service.job_entry import read_error

Say = Callable[[str], None]

_FLEETING = {"attempt", "provenance", "oldest_version", "began_on"}
"""Of a spec, what is no part of its Job's name; the oldest version follows from the configuration and the iteration."""
_LABEL_LENGTH = 20
"""Of a stage's kind in a Job's name."""


class JobWorkers:
    """A Job for each of these tasks."""

    ending_seconds = GONE_SECONDS + 10.0

    def __init__(self, run: Run, distribution: JobShards, tasks: Sequence[ShardTask]) -> None:
        infra = run.config.infra
        assert isinstance(infra, KubernetesInfra), "refused at load (config.checks)"
        self._infra = infra
        self._plans = {task.label: plan_of(run, infra, distribution, task) for task in tasks}
        self._patience = float(
            infra.collector.pending_seconds + infra.collector.image_seconds if infra.collector else 0
        )
        if infra.queue:
            self._patience += infra.queue_seconds
        self._cluster = connect(infra)
        self._jobs = RunJobs(self._cluster, infra.namespace, run.uid)

    def __enter__(self) -> Self:
        try:
            stages = {plan.stage for plan in self._plans.values()}
            for stage in stages:
                self._jobs.end_others({PLACE: stage}, {plan.identity.digest for plan in self._plans.values()})
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.__exit__(kind, error, trace)
        self._cluster.close()

    def metrics(self) -> dict[str, float]:
        return {"kubernetes_calls": float(self._cluster.calls.total())}

    def run(self, task: ShardTask, said: Say, stopped: threading.Event) -> None:
        plan = self._plans[task.label]

        def told(number: int) -> RoundhouseError | None:
            return read_error(task.place)

        # silent until the worker speaks: it waits in a queue, for a node, for its image
        waiting = ACTIVITY.start("collect", "job", task.label, f"namespace {plan.namespace}", self._patience)

        def heard(line: str) -> None:
            if finished_in(line) is not None:
                ACTIVITY.end(waiting)
            said(line)

        try:
            self._jobs.run(plan, heard, lambda number: task.prepare(), told, lambda number: _has_report(task), stopped)
        except Unwanted:
            raise Stopped from None
        finally:
            ACTIVITY.end(waiting)


def plan_of(run: Run, infra: KubernetesInfra, distribution: JobShards, task: ShardTask) -> ShardJob:
    """The shard as a Job: pure. Which attempt at the stage asks for it makes no difference, nor which version of the code, nor
    which weights the engine holds by then: what one has begun, another goes on with, as with a report that one has left."""
    tree = task.spec.model_dump(mode="json", exclude=_FLEETING) | {"after": task.after}
    identity = StageIdentity(
        run_id=run.run_id,
        run_uid=run.uid,
        iteration=task.spec.iteration,
        stage=dns_label(task.spec.kind, _LABEL_LENGTH),
        digest=hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:32],
        shard=task.label,
    )
    store = Location(run.config.store).uri
    return ShardJob(identity, infra, distribution, spec=task.spec_uri, stage=task.spec.stage, store=store)


def _has_report(task: ShardTask) -> bool:
    """Whether the task's worker has left its report, and it is there still."""
    try:
        found = task.place.read(REPORT)
    except NotFound:
        return False
    return hashlib.sha256(found).hexdigest() != task.after
