"""Client of the supervisor: request services and return them.

Invariant: `request` returns after every awaited service was healthy after the request, or returns the leases that it
took. The caller never waits longer than its time limit.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from roundhouse.cpu import slowness
from roundhouse.errors import InfraError
from roundhouse.http import ports as tcp
from roundhouse.infra import processes
from roundhouse.infra.service_specs import SERVICE_SPECS
from roundhouse.infra.state import ServiceHolder, ServiceLease, ServiceRecord, StateDirectory

log = logging.getLogger(__name__)

Progress = Callable[[ServiceRecord], None]
"""Called with a service's record whenever its status changed."""

POLL_SECONDS = 0.04
STOP_SECONDS = 45.0
"""Time limit for an orderly end of everything, beyond each service's grace."""
SUPERVISOR_STARTS = 3
ENDED = ("stopped", "failed")
LOG_TAIL_LINES = 15

_supervisors: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process started: polled, so that an ended one does not stay as a zombie."""


@dataclass(frozen=True)
class LeaseRequest:
    """One holder's request for some services."""

    state: StateDirectory
    holder: ServiceHolder
    services: tuple[str, ...]
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Service -> port name -> number, for ports that are fixed by the caller."""
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Service -> more arguments of its command. A service that is not named is taken as it runs."""
    unawaited: Collection[str] = ()
    """Services that are requested but not awaited: only their address is needed. Their failure is not an error."""

    def lease(self) -> tuple[int, frozenset[str]]:
        """Write the leases. Returns the request's number and the services that this holder did not have before."""
        with self.state.lock():
            leases, running = self.state.wanted(), self.state.running()
            alive = self.state.supervised()
            revision = 1 + max([leases.revision, *(record.answered for record in running.services.values())])
            added = set()
            for name in self.services:
                lease = leases.services.get(name) or ServiceLease([], revision)
                record = running.services.get(name)
                supervised = alive and name in leases.services
                self._refuse_ports(name, record if supervised else None)
                if supervised and not (record and record.status == "failed" and record.answered >= lease.asked):
                    self._refuse_arguments(name, lease)
                if self.holder not in lease.holders:
                    added.add(name)
                lease.arguments = self._arguments(name, lease)
                # Pages that an earlier run left up belong to the next caller and end with it.
                others = [holder for holder in lease.holders if holder.kind != "kept" and holder != self.holder]
                lease.holders, lease.asked = [*others, self.holder], revision
                lease.ports = dict(self.ports.get(name, lease.ports))
                leases.services[name] = lease
            leases.revision = revision
            self.state.hand_over({key: value for key, value in os.environ.items() if key != processes.MARK})
            self.state.write_wanted(leases)
        return revision, frozenset(added)

    def end_unused(self) -> None:
        """End the services that nobody uses any more and that would have to run with other arguments."""
        if not self.state.supervised():
            return
        with self.state.lock():
            leases, records = self.state.wanted(), self.state.running().services
            ending = [
                name
                for name in self.services
                if self._is_in_the_way(name, leases.services.get(name), records.get(name))
            ]
            for name in ending:
                leases.services.pop(name, None)
            if ending:
                self.state.write_wanted(leases)
        if ending:
            await_ended(self.state, ending)

    def _is_in_the_way(self, name: str, lease: ServiceLease | None, record: ServiceRecord | None) -> bool:
        if lease is None:  # the supervisor ends it, or has not yet seen that it has to and would take it for the next
            requested = list(self.arguments.get(name, ()))
            return record is not None and record.status not in ENDED and requested != record.arguments
        return self._arguments(name, lease) != lease.arguments and not any(
            holder.kind != "kept" and holder.alive() for holder in lease.holders
        )

    def _arguments(self, name: str, lease: ServiceLease) -> list[str]:
        """Return the service's arguments: without a request, those of a person's running service."""
        requested = self.arguments.get(name)
        if requested is None or (not requested and any(holder.kind == "user" for holder in lease.holders)):
            return lease.arguments
        return list(requested)

    def _refuse_ports(self, name: str, record: ServiceRecord | None) -> None:
        """`record` is that of a service under supervision, else None."""
        for port_name, port in self.ports.get(name, {}).items():
            if record and record.pid:
                if record.ports.get(port_name) != port:
                    raise InfraError(
                        f"{name} already runs with {port_name} port {record.ports.get(port_name)}, not {port}. "
                        "Run `roundhouse down` first, or leave the port open."
                    )
            elif not tcp.is_free(port):
                owner = tcp.describe_owner(port) or "another process"
                raise InfraError(
                    f"Port {port}, asked for as the {port_name} port of {name}, is in use by {owner}. "
                    "Stop that process, choose another port, or leave it open and a free one is taken."
                )

    def _refuse_arguments(self, name: str, lease: ServiceLease) -> None:
        if (requested := self._arguments(name, lease)) != lease.arguments:
            raise InfraError(
                f"{name} already runs with the arguments {lease.arguments}, not {requested}. Run `roundhouse down` first, "
                "or name another state directory (infra.state)."
            )


def request(wish: LeaseRequest, time_limit: float, on_progress: Progress | None = None) -> dict[str, ServiceRecord]:
    """Lease the services, start the supervisor if necessary, and wait until all are healthy."""
    wish.state.create()
    wish.end_unused()
    revision, added = wish.lease()
    try:
        return _await_ready(wish, revision, time_limit, on_progress or (lambda record: None))
    except BaseException:
        release(wish.state, wish.holder, added)
        raise


def _await_ready(
    wish: LeaseRequest, revision: int, time_limit: float, on_progress: Progress
) -> dict[str, ServiceRecord]:
    state, began, starts = wish.state, time.monotonic(), 0
    statuses: dict[str, str] = {}
    while True:
        if not state.supervised():
            if starts == SUPERVISOR_STARTS:
                raise InfraError(
                    f"The supervisor of {state.path} does not stay alive. Its log, {state.log('supervisor')}, "
                    f"ends with:\n{log_tail(state, 'supervisor')}"
                )
            _start_supervisor(state)
            starts += 1
        records = {name: record for name, record in state.running().services.items() if name in wish.services}
        current = {name: record for name, record in records.items() if record.answered >= revision}
        for name, record in current.items():
            if statuses.get(name) != record.status:
                statuses[name] = record.status
                on_progress(record)
            if record.status == "failed" and name not in wish.unawaited:
                own_logs = state.path / "ray" / "session_latest" / "logs"
                raise InfraError(
                    f"{name} did not start. {record.detail} Its log, {record.log}, ends with:\n{log_tail(state, name)}"
                    + (f"\nRay's own logs are in {own_logs}." if name == "ray" else "")
                )
        late = [name for name in wish.services if not _is_there(wish, current, records, name)]
        if not late:
            return records
        if time.monotonic() > began + time_limit * slowness():
            tails = "\n".join(f"{state.log(name)} ends with:\n{log_tail(state, name)}" for name in late)
            raise InfraError(
                f"Not ready within {time_limit:.0f} s (infra.start_timeout_seconds): {', '.join(late)}.\n{tails}"
            )
        time.sleep(POLL_SECONDS)


def _is_there(
    wish: LeaseRequest, current: Mapping[str, ServiceRecord], records: Mapping[str, ServiceRecord], name: str
) -> bool:
    if name not in wish.unawaited:
        return name in current and current[name].status == "ready"
    record = current.get(name, records.get(name))
    return record is not None and bool(record.url) and (name in current or record.pid != 0)


def release(
    state: StateDirectory, holder: ServiceHolder, services: Collection[str], *, keep: Collection[str] = ()
) -> None:
    """Release the holder's leases; services in `keep` stay without a holder. Waits until the others have ended."""
    with state.lock():
        leases = state.wanted()
        for name in services:
            lease = leases.services.get(name)
            if lease is None:
                continue
            lease.holders = [other for other in lease.holders if other != holder]
            if name in keep and not lease.holders:
                lease.holders = [ServiceHolder("kept")]
            if not lease.holders:
                del leases.services[name]
        state.write_wanted(leases)
        ending = [name for name in services if name not in leases.services]
    await_ended(state, ending)


def withdraw(state: StateDirectory, services: Collection[str] | None) -> list[str]:
    """Drop everybody's leases on the services (None: all) and wait until they have ended. Returns what ran."""
    if not state.path.exists():
        return []
    with state.lock():
        leases = state.wanted()
        dropped = [name for name in leases.services if services is None or name in services]
        leases.services = {name: lease for name, lease in leases.services.items() if name not in dropped}
        state.write_wanted(leases)
        (state.path / "handover.json").unlink(missing_ok=True)
    await_ended(state, dropped if services is None else list(services))
    return dropped


def await_ended(state: StateDirectory, services: Collection[str]) -> None:
    """Wait for the supervisor to end the services; do it in its stead when it is dead or does not.

    When nothing is wanted any more the supervisor ends too, and is waited for. A service that somebody wants again meanwhile is
    theirs, and left alone.
    """
    deadline = time.monotonic() + STOP_SECONDS
    while state.supervised() and time.monotonic() < deadline:
        leases, records = state.wanted().services, state.running().services
        ended = all(name in leases or name not in records or records[name].status in ENDED for name in services)
        if ended and leases:
            break
        time.sleep(POLL_SECONDS)
    else:
        with state.lock():
            # With it all its services die, so that it stays as long as anybody has one.
            if state.supervised() and not state.wanted().services:
                log.warning("The supervisor of %s does not end its services; it is killed.", state.path)
                with suppress(ProcessLookupError):
                    os.kill(state.running().supervisor_pid, signal.SIGKILL)
    _supervisors[:] = [supervisor for supervisor in _supervisors if supervisor.poll() is None]
    if left := processes.end(lambda: _unwanted(state, services), grace_seconds=2.0):
        names = ", ".join(services) or "the services"
        raise InfraError(f"Processes {left} of {names} cannot be ended. Look at them with `ps`.")


def _unwanted(state: StateDirectory, services: Collection[str]) -> list[psutil.Process]:
    """Return processes of unwanted services; of all services if none is wanted and no supervisor lives. The lock
    prevents a new lease, and so a new process."""
    with state.lock():
        leases = state.wanted().services
        if not leases and not state.supervised():
            return processes.members(state)
        return [process for name in services if name not in leases for process in processes.members(state, name)]


def _start_supervisor(state: StateDirectory) -> None:
    """Start the supervisor in a separate session, so that a Ctrl-C in the terminal reaches only the run, which then
    decides."""
    environment = {key: value for key, value in os.environ.items() if key != processes.MARK}
    with state.log("supervisor").open("ab") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "roundhouse.infra.supervisor", str(state.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    _supervisors.append(supervisor)
    deadline = time.monotonic() + 30
    while supervisor.poll() is None and time.monotonic() < deadline:
        if state.running().supervisor_pid == supervisor.pid:
            return
        time.sleep(0.05)


def log_tail(state: StateDirectory, name: str) -> str:
    path = state.log(name)
    if not path.exists():
        return "(no log)"
    return textwrap.indent(processes.end_of_log(path, LOG_TAIL_LINES), "    ", lambda line: True)


def known(services: Collection[str]) -> tuple[str, ...]:
    """The names, checked."""
    for name in services:
        if name not in SERVICE_SPECS:
            raise InfraError(f"No service is called {name!r}. Services: {', '.join(SERVICE_SPECS)}.")
    return tuple(dict.fromkeys(services))
