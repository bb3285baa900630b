"""Programs as Jobs of a cluster.

Invariant: for one program at most one Job is under way, also when the flow dies and comes back: its name is made of all that
the program depends on (`Program.digest`), so it is found and waited for. Jobs that the stage began and does not want any more
(another plan, other settings) are deleted before one is created. Two watches report on all Jobs of the stage.

Resident ranks are never found again, since they belong to the process that is gone: they are deleted, and others started.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from roundhouse.activity import ACTIVITY
from roundhouse.config.training import ProcessService, ResidentService
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.launch.base import Launcher, Program, Say, Stopped
from roundhouse.plugins.kubernetes import stage_jobs
from roundhouse.plugins.kubernetes.cluster import OwnedResources, connect
from roundhouse.plugins.kubernetes.job import GONE_SECONDS, RunJobs, Unwanted
from roundhouse.plugins.kubernetes.names import StageIdentity, dns_label
from roundhouse.plugins.kubernetes.stage_jobs import PLACE, RANKS_PLACE, ShardJob, TrainJob
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.training.service.job_entry import SPEC, read_error

_LABEL_LENGTH = 20
"""Length of a stage's kind in a Job's name."""


class KubernetesLauncher(Launcher):
    """A Job for each program, of the pods of `infra.trainer` or `infra.collector`."""

    ending_seconds = GONE_SECONDS + 10.0

    def __init__(self, run: Run | None) -> None:
        if run is None or (infra := run.config.infra.cluster) is None:
            raise ConfigError("The launcher kubernetes needs the section infra with kind: kubernetes. Set it.")
        self._run, self._infra = run, infra
        self._store = Location(run.config.store).uri
        self._cluster = connect(self._infra)
        self._jobs = RunJobs(self._cluster, self._infra.namespace, run.uid)
        trainer = self._infra.trainer
        self.waiting_seconds = float(trainer.pending_seconds + trainer.image_seconds)
        self.waiting_seconds += self._infra.queue_seconds if self._infra.queue else 0

    def expect(self, programs: Sequence[Program]) -> None:
        plans = [self._shard(program) for program in programs if program.stage == "collect"]
        for stage in {plan.stage for plan in plans}:
            self._jobs.end_others({PLACE: stage}, {plan.identity.digest for plan in plans})

    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        try:
            return (
                self._train(program, said, stopped)
                if program.stage == "train"
                else self._collect(program, said, stopped)
            )
        except Unwanted:
            raise Stopped from None

    def caches(self, own: Path) -> dict[str, object]:
        trainer = self._infra.trainer
        if not trainer.cache_claim:
            return {"cache": stage_jobs.CACHE}
        gib = int(trainer.cache_gib * 2**30)
        return {"cache": stage_jobs.CACHE, "node_cache": stage_jobs.NODE_CACHE, "node_cache_bytes": gib}

    def metrics(self) -> dict[str, float]:
        return {"kubernetes_calls": float(self._cluster.calls.total())}

    def close(self) -> None:
        self._jobs.close()
        self._cluster.close()

    def _train(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        """Each try has a new place: several pods may have left files at the previous one."""
        service = self._run.config.train.service
        assert isinstance(service, ProcessService | ResidentService), "the kinds that have a launcher"
        plan = TrainJob(
            self._identity(program),
            self._infra,
            service,
            reports=program.place.uri,
            module=program.module,
            stays=program.stays,
            flow=OwnedResources(self._cluster, self._infra.namespace).flow() if program.stays else None,
            store=self._store,
        )
        if program.stays:
            self._jobs.end_others({PLACE: RANKS_PLACE}, {program.digest})

        def place(number: int) -> Location:
            return Location(plan.report(number))

        where = f"namespace {plan.namespace}"
        with ACTIVITY.track("train", "job", where=where, patience=program.timeout_seconds):
            number = self._jobs.run(
                plan,
                said,
                lambda number: program.prepare(place(number)),
                lambda number: read_error(place(number)),
                stopped=stopped,
            )
        return place(number)

    def _collect(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        plan = self._shard(program)
        # silent until the worker speaks: it waits in a queue, for a node, for its image
        patience = float(plan.settings.pending_seconds + plan.settings.image_seconds)
        patience += self._infra.queue_seconds if self._infra.queue else 0
        waiting = ACTIVITY.start("collect", "job", program.label, f"namespace {plan.namespace}", patience)

        def heard(line: str) -> None:
            if program.is_progress is not None and program.is_progress(line):
                ACTIVITY.end(waiting)
            said(line)

        def told(number: int) -> RoundhouseError | None:
            return read_error(program.place)

        try:
            self._jobs.run(
                plan, heard, lambda number: program.prepare(), told, lambda number: program.has_report(), stopped
            )
        finally:
            ACTIVITY.end(waiting)
        return program.place

    def _shard(self, program: Program) -> ShardJob:
        shards = self._run.config.rollout.distribution.workers
        assert shards is not None, "a collection in this process has no shards"
        spec = f"{program.place.uri}/{SPEC}"
        return ShardJob(
            self._identity(program),
            self._infra,
            shards,
            spec=spec,
            stage=program.stage_uri,
            store=self._store,
            variables=program.environment,
        )

    def _identity(self, program: Program) -> StageIdentity:
        return StageIdentity(
            run_id=self._run.run_id,
            run_uid=self._run.uid,
            iteration=program.iteration,
            stage=dns_label(program.kind, _LABEL_LENGTH),
            digest=program.digest,
            shard=program.label,
            extra=self._run.config.tracking.labels,
        )
