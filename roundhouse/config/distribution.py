"""Over which workers a collection is spread: one section a kind.

Invariant: the kind and the number of shards never change what is collected, only who collects it: rollout ids, seeds and, with
a deterministic engine, every byte of what is trained on stay the same.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roundhouse.config.section import PositiveFloat, PositiveInt, Section


class InProcessCollection(Section):
    """All in the process of the collect stage."""

    kind: Literal["in_process"] = "in_process"


class Shards(Section):
    """What all kinds of workers share. A shard is a part of the collection by whole groups."""

    shards: PositiveInt = 2
    """How many workers; not more than the collection has groups. They share `rollout.concurrency`. With `asynchrony.staleness`
    above 0 as many are at work at once, over all iterations that are collected."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """How often a worker that was lost is started again within an attempt at the stage; it makes only what is missing."""
    timeout_seconds: PositiveFloat = 3600
    """Time limit of one worker, from its start to its last rollout. A Job's wait for a node counts."""


class ProcessShards(Shards):
    """Processes beside the stage's own."""

    kind: Literal["process"] = "process"


class JobShards(Shards):
    """Jobs of one pod each, on the cluster of `infra`; `infra.collector` says what a pod is."""

    kind: Literal["job"] = "job"


Distribution = Annotated[InProcessCollection | ProcessShards | JobShards, Field(discriminator="kind")]
