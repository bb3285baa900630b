"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

STARTS = 3
"""A node has half a minute to register, which a busy machine may not give it."""


@contextmanager
def two_ray_nodes(**node: int) -> Iterator[Cluster]:
    """A cluster of two such nodes, which this process has joined.

    Ray's directory is its own: in /tmp/ray it would leave its address, which other clients of Ray join.
    """
    before = set(psutil.Process().children(recursive=True))
    with (
        tempfile.TemporaryDirectory(prefix="rhn", dir="/tmp", ignore_cleanup_errors=True) as place,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", place)  # sockets have short names
        cluster = _started(before, {"object_store_memory": 80_000_000, **node})
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            end_children_but(before)


def _started(before: set[psutil.Process], node: dict[str, int]) -> Cluster:
    for start in range(STARTS):
        found = Cluster()
        try:
            found.add_node(**node, include_dashboard=False)
            found.add_node(**node)
            ray.init(address=found.address, log_to_driver=False, configure_logging=False)
        except Exception:  # what Ray raises of a start that took too long is a plain one
            ray.shutdown()
            found.shutdown()
            end_children_but(before)  # Ray has forgotten those of a node that did not register
            if start == STARTS - 1:
                raise
        else:
            return found
    raise AssertionError("unreachable")


def end_children_but(kept: set[psutil.Process]) -> None:
    """Stop the processes that this process has started since."""
    started = [child for child in psutil.Process().children(recursive=True) if child not in kept]
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(started, timeout=10)
