"""Shards of a collection: a pure function of its plan.

Invariant: each planned rollout and each group is in exactly one shard, chosen only by the plan and the number of
shards. A file's name identifies the shard that wrote it, so a worker reads only its own files.

    groups a b c d e, 2 shards  ->  s0001of0002: a b c     s0002of0002: d e
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict

from roundhouse.config.models import RunConfig, Sampling
from roundhouse.launch.base import Program
from roundhouse.rollout.plan import BranchPoint, RolloutSpec
from roundhouse.store.stage import FileEntry, Provenance
from roundhouse.trajectories.records import Ledger

_LABEL = re.compile(r"-(?P<label>s\d{4,}of(?P<count>\d{4,}))-")


_PROGRESS = re.compile(r"s\d{4,}of\d{4,}: (\d+) of \d+ rollouts")


@dataclass(frozen=True)
class Shard:
    """Some groups of a plan."""

    number: int
    """1, 2, …"""
    count: int
    """Number of requested shards; some may be empty and are not made."""
    specs: Sequence[RolloutSpec]

    @property
    def label(self) -> str:
        return f"s{self.number:04d}of{self.count:04d}"

    @cached_property
    def rollout_ids(self) -> frozenset[str]:
        return frozenset(spec.rollout_id for spec in self.specs)

    def may_be_in(self, name: str) -> bool:
        """Return whether a part of this name can hold rollouts of this shard: its own parts, and parts of attempts with
        another split or without one."""
        match = _LABEL.search(name)
        return match is None or int(match["count"]) != self.count or match["label"] == self.label

    def digest(self) -> str:
        """Digest of its rollouts and their seeds."""
        plan = "\n".join(f"{spec.rollout_id} {spec.seed}" for spec in self.specs)
        return hashlib.sha256(plan.encode()).hexdigest()


def split(specs: Sequence[RolloutSpec], count: int) -> list[Shard]:
    """At most `count` shards with at least one group each, in the plan's order; they differ by one group at most."""
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group_id)]
    n = min(count, len(groups))
    borders = [index * len(groups) // n for index in range(n + 1)] if n else []
    shards = []
    for number, (first, last) in enumerate(pairwise(borders), 1):
        shards.append(Shard(number, count, [spec for group in groups[first:last] for spec in group]))
    return shards


def shares(whole: int, count: int) -> list[int]:
    """A whole number in `count` parts that differ by one at most; none is 0.

    >>> shares(7, 3)
    [3, 2, 2]
    """
    return [max(1, whole // count + (index < whole % count)) for index in range(count)]


class PlannedGroup(BaseModel):
    """A group's task row, once, and the seeds of its rollouts by sample; of branches, also the rollout that they leave."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_id: str
    row: dict[str, Any]
    seeds: dict[int, int]
    branch: BranchPoint | None = None


class ShardSpec(BaseModel):
    """Everything that a worker depends on, apart from the engine and the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    config: RunConfig
    """The run's, with this shard's share of `rollout.concurrency`."""
    sampling: Sampling
    on_policy: bool
    engine_url: str
    provenance: Provenance
    oldest_version: int | None = None
    """Oldest version in the stage's rollouts, if older than the stage's version."""
    began_on: int | None = None
    """Version that the engine held at the shard's start, for agents that do not report one; if unset, the stage's."""
    stage: str
    """URI of the stage's directory."""
    kind: str
    """The stage's: collect or evaluate."""
    iteration: int
    attempt: int
    """Attempt that the worker writes for."""
    number: int
    count: int
    groups: list[PlannedGroup]
    place: str
    """URI of the directory for report or error."""

    def shard(self) -> Shard:
        specs = [
            RolloutSpec(group.group_id, sample, group.row, seed, group.branch)
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
    """Counts of `rollout.replay.ResumptionCounts.details`."""
    seconds: float
    """In which rollouts ran."""
    cpu_seconds: float
    """CPU seconds of the worker, including its start."""
    max_rss_mib: float


def finished_in(line: str) -> int | None:
    """How many rollouts are finished, where a worker's line says that."""
    match = _PROGRESS.fullmatch(line)
    return None if match is None else int(match[1])


def begun_on(program: Program, version: int) -> Program:
    """The same worker, begun when the engine holds this version."""
    return replace(program, spec=program.spec.model_copy(update={"began_on": version}))


def planned_groups(shard: Shard) -> list[PlannedGroup]:
    """The shard's rollouts, for its spec."""
    first: dict[str, RolloutSpec] = {}
    seeds: dict[str, dict[int, int]] = {}
    for spec in shard.specs:
        first.setdefault(spec.group_id, spec)
        seeds.setdefault(spec.group_id, {})[spec.sample] = spec.seed
    return [
        PlannedGroup(group_id=group, row=spec.row, seeds=seeds[group], branch=spec.branch)
        for group, spec in first.items()
    ]
