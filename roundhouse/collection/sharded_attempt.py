"""Attempt at a collect stage by shards: the workers' tasks, and their results as one manifest.

Invariant: the commit contains each planned rollout once, from any worker. A shard's report is checked against the plan
and against its files before it counts. A worker's CPU seconds are charged once, to its own attempt.

    shard ── task ──> worker ── report ──> outcome ── take ──┐
    shard ── left_before: its report of an earlier attempt ──┼── commit: one manifest
    shard ── taken_over: rollouts without a report ──────────┘
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from roundhouse.activity import ACTIVITY
from roundhouse.collection.shards import Shard, ShardReport, ShardSpec, finished_in, planned_groups
from roundhouse.config.environments import SERVERS_VARIABLE
from roundhouse.config.models import Sampling
from roundhouse.config.rollout import InProcessCollection
from roundhouse.cpu import take_seconds
from roundhouse.errors import InfraError, StoreError
from roundhouse.launch.base import Launcher, Program, open_launcher
from roundhouse.retry import Backoff
from roundhouse.rollout.plan import RolloutSpec, reorder
from roundhouse.rollout.replay import ResumptionCounts
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run
from roundhouse.store.stage import WRITERS, FileEntry, Reference, Stage, parse_parquet, read_entry
from roundhouse.training.service.job_entry import REPORT
from roundhouse.trajectories.records import Ledger, LedgerError, Rollout, Status
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, summaries_from_tables, turns_table

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
"""Before a lost worker is started again; twice as long each time after."""
WORKER = "roundhouse.collection.shard_worker"
_FLEETING = {"attempt", "provenance", "oldest_version", "began_on"}
"""Fields in which two specs may differ and still describe the same work; the oldest version follows from configuration
and iteration."""


@dataclass(frozen=True)
class ShardOutcome:
    """A shard that is whole."""

    label: str
    report: ShardReport
    rollouts: list[Rollout]
    """Outlines, in the plan's order."""
    fresh: bool
    """A worker of this attempt made it."""

    def details(self) -> dict[str, Any]:
        """For the manifest."""
        report = self.report.model_dump(include={"attempt", "seconds", "cpu_seconds", "max_rss_mib"})
        return {"shard": self.label, **self.report.ledger.counts(), **report}


class ShardedAttempt:
    """See the module's docstring."""

    def __init__(self, run: Run, stage: Stage, policy_version: int, oldest_version: int | None = None) -> None:
        """Open the attempt.

        Args:
            policy_version: the collected version.
            oldest_version: also accept calls of versions from this one on.
        """
        distribution = run.config.rollout.distribution.workers
        assert distribution is not None, "a collection in one process has no shards"
        self.run = run
        self.distribution = distribution
        self.stage = stage
        self._losses: Counter[str] = Counter()
        """Workers that were lost, by the place of their shard's reports."""
        self._oldest_version = oldest_version
        self._attempt = run.begin(stage, policy_version=policy_version)
        self.rounds = 0
        """Number of started rounds, each split into separate shards."""
        self._outcomes: list[ShardOutcome] = []
        self._cost: dict[str, float] = {}

    def task(
        self,
        shard: Shard,
        sampling: Sampling,
        engine_url: str,
        concurrency: int | None,
        *,
        on_policy: bool = True,
    ) -> Program:
        """Return the task for a worker of this shard of the newest round. Another attempt finds the results of the
        same task."""
        config, provenance = self.run.config, self._attempt.provenance
        depends = f"{self.run.uid} {provenance.policy_version} {sampling} {on_policy} {shard.digest()}"
        name = f"{shard.label}-{self.rounds}-{hashlib.sha256(depends.encode()).hexdigest()[:12]}"
        place = self.stage.location / WRITERS / name
        rollout = config.rollout.model_copy(update={"concurrency": concurrency, "distribution": InProcessCollection()})
        spec = ShardSpec(
            config=config.model_copy(update={"rollout": rollout}),
            sampling=sampling,
            on_policy=on_policy,
            engine_url=engine_url,
            provenance=provenance,
            oldest_version=self._oldest_version,
            stage=self.stage.location.uri,
            kind=self.stage.kind,
            iteration=self.stage.iteration,
            attempt=self._attempt.number,
            number=shard.number,
            count=shard.count,
            groups=planned_groups(shard),
            place=place.uri,
        )
        after = _digest(place)
        gym = {name: os.environ[name] for name in (SERVERS_VARIABLE,) if name in os.environ}
        # Which attempt asks for it makes no difference, nor which version of the code, nor which weights the engine holds by
        # then: what one has begun, another continues, as with a report that one has left.
        tree = spec.model_dump(mode="json", exclude=_FLEETING) | {"after": after, **gym}
        return Program(
            what=f"Shard {shard.label}",
            module=WORKER,
            spec=spec,
            place=place,
            place_field="place",
            stage="collect",
            timeout_seconds=self.distribution.timeout_seconds,
            timeout_key="rollout.distribution.timeout_seconds",
            iteration=spec.iteration,
            kind=spec.kind,
            stage_uri=spec.stage,
            label=shard.label,
            digest=hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:32],
            after=after,
            is_progress=lambda line: finished_in(line) is not None,
            environment=gym,
        )

    def finished(self, specs: Sequence[RolloutSpec]) -> frozenset[str]:
        """Return all rollouts that an earlier attempt may have finished; `left_before` identifies whole shards."""
        return frozenset(spec.rollout_id for spec in specs) if self._attempt.number > 1 else frozenset()

    def open_launcher(self, programs: Sequence[Program]) -> Launcher:
        """Open the launcher for these programs, and end unwanted workers that the stage started."""
        launcher = open_launcher(self.distribution.launcher_name, "rollout.distribution.launcher", self.run)
        try:
            launcher.expect(programs)
        except BaseException:
            launcher.close()
            raise
        return launcher

    def work(
        self,
        launcher: Launcher,
        shard: Shard,
        task: Program,
        stopped: threading.Event,
        finished: MutableMapping[str, int],
    ) -> ShardOutcome:
        """Let a worker collect a shard, in the calling thread.

        Args:
            task: task of the shard; if the worker starts on another version, the task of `begun_on`.
            finished: called with a shard and its number of finished rollouts.

        Raises:
            InfraError: the worker was lost; `may_repeat` decides about another one.
            Stopped: `stopped` was set.
        """

        def heard(line: str) -> None:  # in whatever thread
            ACTIVITY.advance(token)
            if (count := finished_in(line)) is not None:
                finished[shard.label] = count
            else:
                log.info("iteration %d, %s: %s", self.stage.iteration, shard.label, line)

        with ACTIVITY.track("collect", "shard", shard.label) as token:
            launcher.run(task, heard, stopped)
            return self.outcome(shard, task)

    def may_repeat(self, task: Program, error: InfraError, stopped: threading.Event) -> bool:
        """Count a lost worker and wait until another one may begin; False after `rollout.distribution.restarts`, or when the
        shard is not wanted any more."""
        if stopped.is_set():
            return False
        self._losses[task.place.uri] += 1
        if (losses := self._losses[task.place.uri]) > self.distribution.restarts:
            return False
        log.warning("%s of iteration %d was lost and is collected on: %s", task.label, self.stage.iteration, error)
        stopped.wait(Backoff(FIRST_PAUSE_SECONDS).pause(losses))
        return True

    def left_before(self, shard: Shard, task: Program, is_settled: bool = False) -> ShardOutcome | None:
        """Return a whole result of an earlier attempt's worker; one with failed rollouts only if no more rollouts are
        to be made."""
        if not task.after or (report := _read_report(task.place)) is None:
            return None
        if report.ledger.failed and not is_settled:
            return None
        try:
            return self._checked(shard, report, fresh=False)
        except StoreError as error:
            if isinstance(error, InfraError):
                raise
            log.warning("%s is collected again: %s", shard.label, error)
            return None

    def taken_over(self, shard: Shard, written: Mapping[str, Rollout], is_settled: bool = False) -> ShardOutcome | None:
        """Build the shard from stored rollouts without a report, written again as its worker would. Return None if a
        rollout is missing or failed; if no more rollouts are to be made, only if all are missing."""
        stored = [written[spec.rollout_id] for spec in shard.specs if spec.rollout_id in written]
        lacks = len(stored) < len(shard.specs) or any(rollout.status is Status.FAILED for rollout in stored)
        if not stored or (lacks and not is_settled):
            return None
        writer = self.stage.join(self._attempt.provenance, self._attempt.number, shard.label)
        turns, rollouts = turns_table(stored), rollouts_table(stored)
        report = ShardReport(
            attempt=self._attempt.number,
            files=[writer.write_table("turns", turns), writer.write_table("rollouts", rollouts)],
            ledger=Ledger.from_rollouts(stored, requested=len(stored)),
            resumptions=ResumptionCounts().details(),
            seconds=0.0,
            cpu_seconds=0.0,
            max_rss_mib=0.0,
        )
        return ShardOutcome(shard.label, report, summaries_from_tables(rollouts, turns), fresh=False)

    def outcome(self, shard: Shard, task: Program) -> ShardOutcome:
        """Return the result of a worker.

        Raises:
            InfraError: it left no report.
            StoreError, ReorderError, LedgerError: see `_checked`.
        """
        report = _read_report(task.place)
        if report is None:
            raise InfraError(
                f"The worker of {task.label} ended without an error, but {task.place.uri} has no complete report."
            )
        return self._checked(shard, report, fresh=True)

    def take(self, outcomes: Sequence[ShardOutcome]) -> None:
        """Make the shards' files the attempt's."""
        for outcome in outcomes:
            for entry in outcome.report.files:
                self._attempt.adopt(FileEntry.model_validate(entry))
        self._outcomes += outcomes

    def whole(self, rollouts: Sequence[Rollout], groups: Collection[str]) -> list[Rollout]:
        """Return the rollouts of these groups, complete, from the shards' files."""
        ids = pa.array([each.rollout_id for each in rollouts if each.group_id in groups], pa.string())
        complete = []
        for outcome in self._outcomes:
            tables = [self._table(outcome.report, dataset) for dataset in ("rollouts", "turns")]
            complete += rollouts_from_tables(*(table.filter(pc.is_in(table["rollout_id"], ids)) for table in tables))
        return complete

    def spend(self, cost: Mapping[str, float]) -> None:
        """Count what waiting for the workers cost (`Launcher.metrics`)."""
        for name, value in cost.items():
            self._cost[name] = self._cost.get(name, 0.0) + value

    def charge(self, cpu_seconds: float) -> None:
        """Count CPU seconds of other threads that worked for this attempt (`roundhouse.cpu`)."""
        self._attempt.charge(cpu_seconds)

    def metrics(self) -> dict[str, float]:
        reports = [outcome.report for outcome in self._outcomes]
        return self._resumptions().metrics() | {
            "rollout/shards": float(len(reports)),
            "rollout/shards_lost": float(self._losses.total()),
            "rollout/shard_cpu_seconds": sum(report.cpu_seconds for report in reports),
            **{f"rollout/{name}": value for name, value in self._cost.items()},
        }

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        """Make the stage complete with all that was taken."""
        recorded = {
            "resumptions": self._resumptions().details(),
            "distribution": {
                "kind": self.distribution.model_dump()["kind"],
                "shards": [outcome.details() for outcome in self._outcomes],
            },
        }
        if used := take_seconds(self.stage.location.uri):
            self._attempt.charge(used)
        else:  # remote workers: their own count is the only one
            reported = [outcome.report.cpu_seconds for outcome in self._outcomes if outcome.fresh]
            self._attempt.charge(sum(reported), of_other_process=True)
        reference = self._attempt.commit(inputs=inputs, counts=counts, metrics=metrics, details=details | recorded)
        # Files that workers exchange are not needed any more
        location = self.stage.location
        try:
            for name in location.names():
                if name.startswith("journal-"):
                    location.delete(name)
            (location / WRITERS).delete_tree()
        except StoreError as error:  # the stage is complete all the same, and `roundhouse store gc` finds the rest
            log.warning("Parts that have served stay: %s", error)
        return reference

    def _checked(self, shard: Shard, report: ShardReport, *, fresh: bool) -> ShardOutcome:
        """Check a report against the plan and its files, and return the outcome.

        Raises:
            StoreError: a file is missing or damaged.
            ReorderError, LedgerError: the files hold other rollouts.
        """
        rollouts = summaries_from_tables(self._table(report, "rollouts"), self._table(report, "turns"))
        index = {spec.rollout_id: place for place, spec in enumerate(shard.specs)}
        ordered = reorder(((index.get(rollout.rollout_id, -1), rollout) for rollout in rollouts), len(index))
        if (counted := Ledger.from_rollouts(ordered, requested=len(shard.specs))) != report.ledger:
            raise LedgerError(f"{shard.label}: its report counts {report.ledger!r}, its files hold {counted!r}.")
        return ShardOutcome(shard.label, report, ordered, fresh)

    def _table(self, report: ShardReport, dataset: str) -> pa.Table:
        entries = [entry for entry in report.files if entry.path.startswith(f"{dataset}-")]
        tables = [parse_parquet(read_entry(self.stage.location, entry)) for entry in entries]
        if not tables:
            raise StoreError(f"The report of a shard of {self.stage.location.uri} names no {dataset}.")
        return pa.concat_tables(tables)

    def _resumptions(self) -> ResumptionCounts:
        counts = ResumptionCounts()
        for outcome in self._outcomes:
            counted = outcome.report.resumptions
            counts.rollouts_resumed += counted["rollouts_resumed"]
            counts.turns_resumed += counted["turns_resumed"]
            counts.rollouts_restarted.update(counted["rollouts_restarted"])
            counts.lost_tokens += counted.get("lost_tokens", 0)  # missing in reports of an older version
        return counts


def _read_report(place: Location) -> ShardReport | None:
    try:
        return ShardReport.model_validate_json(place.read(REPORT))
    except (NotFound, ValidationError):
        return None


def _digest(place: Location) -> str:
    """Return the digest of the stored report; empty without one."""
    try:
        return hashlib.sha256(place.read(REPORT)).hexdigest()
    except NotFound:
        return ""
