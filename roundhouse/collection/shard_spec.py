"""What the worker of a shard is given, and what it leaves.

    <stage>/writers/s0001of0004-1-5f0c…/spec.json      everything that it depends on; no secret is in it
                                       /report.json    exists exactly when all rollouts of the shard have their outcome
                                       /error.json     the error that it ended with

Invariant: a report names files that lie in the stage's directory, with their digests, and its ledger counts exactly the
rollouts of the spec.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from roundhouse.collection.shards import Shard
from roundhouse.config.models import RunConfig, Sampling
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.manifest import FileEntry, Provenance
from roundhouse.trajectories.ledger import Ledger

SPEC, REPORT = "spec.json", "report.json"


class PlannedGroup(BaseModel):
    """A group's task row, once, and the seeds of its rollouts by sample."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_id: str
    row: dict[str, Any]
    seeds: dict[int, int]


class ShardSpec(BaseModel):
    """Everything that a worker depends on, beside the engine and the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    config: RunConfig
    """The run's, with this shard's share of `rollout.concurrency`."""
    sampling: Sampling
    on_policy: bool
    engine_url: str
    provenance: Provenance
    oldest_version: int | None = None
    """Where the stage may hold rollouts of versions older than its own, the oldest."""
    began_on: int | None = None
    """The version that the engine held when the shard began, for agents whose answers do not tell it; the stage's if unset."""
    stage: str
    """URI of the stage's directory."""
    kind: str
    """The stage's: collect or evaluate."""
    iteration: int
    attempt: int
    """That the worker writes for."""
    number: int
    count: int
    groups: list[PlannedGroup]
    place: str
    """URI of the directory for report or error."""

    def shard(self) -> Shard:
        specs = [
            RolloutSpec(group.group_id, sample, group.row, seed)
            for group in self.groups
            for sample, seed in group.seeds.items()
        ]
        return Shard(self.number, self.count, specs)


class ShardReport(BaseModel):
    """`report.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempt: int
    """For which it was written. Rollouts that failed are made anew by the next one."""
    files: list[FileEntry]
    ledger: Ledger
    resumptions: dict[str, Any]
    """As `gym.journal.ResumptionCounts.details`."""
    seconds: float
    """In which rollouts ran."""
    cpu_seconds: float
    """Of the worker, its start included."""
    max_rss_mib: float


def planned_groups(shard: Shard) -> list[PlannedGroup]:
    """The shard's rollouts, for its spec."""
    rows: dict[str, dict[str, Any]] = {}
    seeds: dict[str, dict[int, int]] = {}
    for spec in shard.specs:
        rows[spec.group_id] = spec.row
        seeds.setdefault(spec.group_id, {})[spec.sample] = spec.seed
    return [PlannedGroup(group_id=group, row=rows[group], seeds=seeds[group]) for group in rows]
