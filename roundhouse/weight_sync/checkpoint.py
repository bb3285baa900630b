"""The transport `store`: every replica's node reads the checkpoint's own files. What the others fall back to.

Invariant: nothing is written and no replica has to be up: a committed checkpoint is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from roundhouse.store.manifest import WEIGHTS_DIGEST
from roundhouse.weight_sync.base import Published, RunCheckpoint, WeightTransport
from roundhouse.weight_sync.replica_state import ReplicaReport


class CheckpointTransport(WeightTransport):
    """The files of the checkpoint; from a bucket in parallel ranges, once a node."""

    publishes_engine_format = False

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        from roundhouse.store.stage import read_manifest

        yield Published(read_manifest(checkpoint.reference).details.get(WEIGHTS_DIGEST))
