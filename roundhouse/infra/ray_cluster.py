"""The Ray cluster that NeMo Gym's own servers share: each of them joins one at its start, or starts one of its own.

Invariant: one cluster serves all foreign servers of a start, unless the configuration names one (`ray_head_node_address`). It
runs in the Python of the first of them, since all members of a cluster must have the same version of Ray. Only who has the
token of this start can join it. Whatever other cluster runs on the machine, or ran (Ray keeps the address of the last one, also
of a dead one, and joins it where no address is given), is not asked.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from roundhouse.errors import InfraError
from roundhouse.infra.children import Children

NAME = "ray-cluster"
LOOK_SECONDS = 0.2

_SCRIPT = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
import ray
ray.init(address="local", include_dashboard=False)
place = pathlib.Path(sys.argv[1])
place.with_suffix(".part").write_text(ray.get_runtime_context().gcs_address)
os.replace(place.with_suffix(".part"), place)
while True:
    signal.pause()
"""


def with_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a new token of Ray's, for the cluster and for those that join it."""
    return {**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


async def start_cluster(
    children: Children, python: str, environment: Mapping[str, str], directory: Path, seconds: float
) -> str:
    """Start it among `children`; its address.

    Raises:
        InfraError: it ended, or has no address in time; with the end of its log.
    """
    log = children.log(NAME)
    place = log.with_suffix(".address")
    for left in (log, place):
        left.unlink(missing_ok=True)
    child = children.start(NAME, [python, "-c", _SCRIPT, str(place)], directory, environment)
    deadline = time.monotonic() + seconds
    while not place.exists():
        if child.process.poll() is not None:
            raise InfraError(
                f"The Ray cluster of the foreign servers did not start. The end of {child.log}:\n{child.tail()}"
            )
        if time.monotonic() > deadline:
            raise InfraError(
                f"The Ray cluster of the foreign servers has no address after {seconds:g} s. The end of {child.log}:\n"
                f"{child.tail()}"
            )
        await asyncio.sleep(LOOK_SECONDS)
    return place.read_text()
