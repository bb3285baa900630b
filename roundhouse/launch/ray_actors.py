"""Programs as processes on the nodes of a Ray cluster.

Invariant: a program is the child of an actor that reserves its CPUs and GPUs, and ends with it: when the driver ends,
when the node is lost, and before `run` returns. Actors are never restarted: their work is lost, and the stage retries.
Ranks of several nodes are one group of actors, one per node, which meet at the first one's address; when one ends, all
do. Spec and report pass through the program's place in the store, so our data is never pickled.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from pydantic import BaseModel
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roundhouse.config.operations import LocalInfra, RayCluster, RayResources
from roundhouse.errors import ConfigError, InfraError, RoundhouseError
from roundhouse.launch.base import GroupMember, Launcher, Program, Say, Stopped
from roundhouse.launch.subprocesses import ENDING_SECONDS, POLL_SECONDS, SubprocessLauncher
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.training.service.actor import join_cluster
from roundhouse.training.service.job_entry import ADDRESS_VARIABLE, exit_code, kind_of

LAST_LINES = 12
ANSWER_SECONDS = 30.0
"""Time limit for a running actor to return its program's output."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class PlacedSpec(BaseModel):
    """Stands for a spec that lies at its program's place already."""


class ProgramHost:
    """The actor: runs one program in a child process, and answers calls in the meantime."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._stopped = threading.Event()

    def meet(self) -> tuple[str, int]:
        """This node's address, and a port there that is free now."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            return address, probe.getsockname()[1]

    def run(
        self, place: str, fields: dict[str, Any], machine: int, machines: int, met: tuple[str, int] | None
    ) -> tuple[int, str]:
        """The program's exit code, and its error."""
        group = None if met is None else GroupMember(machines, machine, *met)
        fields["environment"] = _network(group is not None) | fields["environment"]
        program = Program(place=Location(place), place_field="place", spec=PlacedSpec(), group=group, **fields)
        launcher = SubprocessLauncher(None)
        try:
            launcher.run_prepared(program, self._lines.append, self._stopped)
            return 0, ""
        except Stopped:
            return 0, ""
        except RoundhouseError as error:
            return exit_code(error), str(error)
        finally:
            launcher.close()

    def lines(self, since: int) -> list[str]:
        """Return the program's output from this line on."""
        return self._lines[since:]

    def stop(self) -> None:
        """Have the program end; `run` returns then."""
        self._stopped.set()


def _network(among_nodes: bool) -> dict[str, str]:
    """By which address this node is reached, and for gloo its interface: by itself it takes that of the host's name."""
    address = ray.util.get_node_ip_address()
    has = [name for name, addresses in psutil.net_if_addrs().items() if address in (each.address for each in addresses)]
    own = {ADDRESS_VARIABLE: address}
    return own | {GLOO_INTERFACE: has[0]} if among_nodes and has and GLOO_INTERFACE not in os.environ else own


class RayLauncher(Launcher):
    """An actor for each program, or for each of its nodes, on the cluster of `infra.ray`."""

    ending_seconds = ENDING_SECONDS + 2 * ANSWER_SECONDS

    def __init__(self, run: Run | None) -> None:
        infra = None if run is None else run.config.infra
        if infra is not None and not isinstance(infra, LocalInfra):
            raise ConfigError(f"The launcher ray needs infra.kind local, but infra.kind is {infra.kind}.")
        self._cluster = RayCluster() if infra is None else infra.ray
        self.waiting_seconds = 0.0 if run is None else float(getattr(run.config.train.service, "timeout_seconds", 0.0))
        join_cluster(self._cluster.address, "infra.ray.address")

    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        program.prepare()
        resources, nodes = self._cluster.collector, 1
        if program.stage == "train":
            resources, nodes = self._cluster.trainer, self._cluster.trainer.nodes
        where = f"on each of {nodes} nodes" if nodes > 1 else "on a node"
        room = f"{resources.cpus:g} CPUs and {resources.gpus:g} GPUs {where}"
        with _reserved(resources, nodes) as hosts:
            try:
                failed = _wait(program, hosts, room, said, stopped)
            except RayError as error:
                raise InfraError(f"{program.what} was lost with its Ray actor: {error}") from error
        if failed:
            final = next((each for each in failed if not isinstance(each, InfraError)), None)
            # on several nodes each actor reports its own rank's error, or the loss of its peers
            raise final or InfraError("; ".join(dict.fromkeys(map(str, failed))))
        return program.place


@contextmanager
def _reserved(wanted: RayResources, nodes: int) -> Iterator[list[Any]]:
    """Yield actors with their reservations, each on a separate node if there are several; all are ended after the
    block."""
    options: dict[str, Any] = {
        "num_cpus": wanted.cpus,
        "num_gpus": wanted.gpus,
        "max_restarts": 0,
        "max_concurrency": 4,
    }
    together, hosts = None, list[Any]()
    try:
        if nodes > 1:
            bundle = {name: amount for name, amount in (("CPU", wanted.cpus), ("GPU", wanted.gpus)) if amount}
            together = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
        for node in range(nodes):
            where = (
                PlacementGroupSchedulingStrategy(together, placement_group_bundle_index=node) if together else "DEFAULT"
            )
            hosts.append(ray.remote(ProgramHost).options(**options, scheduling_strategy=where).remote())
        yield hosts
    finally:
        for host in hosts:
            with suppress(RayError, RuntimeError):  # the cluster is gone, or this process is not its driver any more
                ray.kill(host)
        if together is not None:
            with suppress(RayError, RuntimeError):
                remove_placement_group(together)


def _wait(
    program: Program, hosts: Sequence[Any], room: str, said: Say, stopped: threading.Event
) -> list[RoundhouseError]:
    """The errors of a program, once it has ended everywhere, or on one node with an error."""
    deadline = time.monotonic() + program.timeout_seconds
    # The actor's data about a program, as plain values; the spec is at its place.
    fields = {
        "what": program.what,
        "module": program.module,
        "stage": program.stage,
        "label": program.label,
        "ranks": program.ranks,
        "stays": program.stays,
        "timeout_seconds": program.timeout_seconds,
        "timeout_key": program.timeout_key,
        "environment": dict(program.environment),
    }
    first, uri = hosts[0], program.place.uri
    met = first.meet.remote() if len(hosts) > 1 else None  # resolved by Ray once the first actor has its place
    running = [host.run.remote(uri, fields, node, len(hosts), met) for node, host in enumerate(hosts)]
    answer, heard, is_asked = first.lines.remote(0), list[str](), False
    said(f"waits for {room} on the Ray cluster")
    while True:
        ended, _ = ray.wait(running, num_returns=len(running), timeout=POLL_SECONDS)
        is_over = len(ended) == len(running) or any(code for code, _ in ray.get(ended))
        if is_over:
            answer = first.lines.remote(len(heard))
            ray.wait([answer], timeout=ANSWER_SECONDS)
        if ray.wait([answer], timeout=0)[0]:
            lines = ray.get(answer)
            heard += lines
            for line in lines:
                said(line)
            answer = first.lines.remote(len(heard))
        if is_over:
            if is_asked:
                raise Stopped
            ended, _ = ray.wait(running, num_returns=len(running), timeout=ENDING_SECONDS)
            if len(ended) < len(running):  # peers that were left; an actor that is killed leaves its files
                for host in hosts:
                    host.stop.remote()
                ended, _ = ray.wait(running, num_returns=len(running), timeout=ENDING_SECONDS + ANSWER_SECONDS)
            return [kind_of(code)(text) for code, text in ray.get(ended) if code]
        if stopped.is_set() and not is_asked:
            is_asked, deadline = True, time.monotonic() + ENDING_SECONDS + ANSWER_SECONDS
            for host in hosts:
                host.stop.remote()
        if time.monotonic() >= deadline:
            if is_asked:
                raise Stopped
            last = "\n".join(heard[-LAST_LINES:]) or f"nothing: has the cluster {room} (infra.ray)?"
            raise InfraError(
                f"{program.what} took longer than {program.timeout_key} ({program.timeout_seconds:.0f} s), the wait for "
                f"{room} of the Ray cluster included, and was ended. Last output: {last}"
            )
