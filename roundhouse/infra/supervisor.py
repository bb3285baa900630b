"""The small process that keeps the local services: `python -m roundhouse.infra.supervisor <state directory>`.

Invariant: leases decide which services run. A service with a live holder is kept running; one without is ended; a
process loses its leases the moment it is gone, even by SIGKILL. Without leases, or on SIGTERM, the supervisor ends
everything and itself. A state directory has one supervisor.

It imports only the standard library and psutil, because it stays as long as the services do and should cost next to
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from roundhouse.http import ports
from roundhouse.infra import processes
from roundhouse.infra.service_monitor import ServiceMonitor
from roundhouse.infra.service_specs import SERVICE_SPECS
from roundhouse.infra.state import RunningServices, ServiceRecord, StateDirectory, WantedServices
from roundhouse.store.process_identity import boot_id

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
LOOK_SECONDS = 0.04
"""Interval at which a tick checks for new leases, which take effect at once."""
ORPHAN_GRACE_SECONDS = 3.0


@dataclass
class Supervisor:
    """All services of one state directory."""

    state: StateDirectory
    running: RunningServices
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    monitors: dict[str, ServiceMonitor] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def serve(self, supervision: TextIO) -> None:
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        while not stop.is_set():
            seen = self.state.wishes_changed()
            leases = self._current_wishes()
            self._follow(leases)
            if not leases.services and not self.tasks and self._retire(supervision):
                return
            until = time.monotonic() + TICK_SECONDS
            while time.monotonic() < until and self.state.wishes_changed() == seen and not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
        log.info("told to stop")
        if self.state.path.exists():
            with self.state.lock():
                leases = self.state.wanted()
                leases.services = {}
                self.state.write_wanted(leases)
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def _current_wishes(self) -> WantedServices:
        """The leases of live holders; none if the state directory is gone."""
        if not self.state.path.exists():
            return WantedServices()
        leases = self.state.wanted()
        if all(holder.alive() for lease in leases.services.values() for holder in lease.holders):
            return leases
        with self.state.lock():
            leases = self.state.wanted()
            for lease in leases.services.values():
                lease.holders = [holder for holder in lease.holders if holder.alive()]
            leases.services = {name: lease for name, lease in leases.services.items() if lease.holders}
            self.state.write_wanted(leases)
        log.info("a holder is gone; still wanted: %s", ", ".join(leases.services) or "nothing")
        return leases

    def _follow(self, wanted: WantedServices) -> None:
        """Start wanted services, end unwanted ones."""
        for name, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[name]
                if error := task.exception() if not task.cancelled() else None:
                    log.error("%s: the monitor failed", name, exc_info=error)
            elif name not in wanted.services and not task.cancelling():
                task.cancel()
        # At every request, even if it starts nothing: the handover holds secrets and must not stay on disk.
        if handed := self.state.take_over():
            self.environment, self.directory = handed
        for name, lease in wanted.services.items():
            record = self.running.services.setdefault(name, ServiceRecord(name))
            if record.answered >= lease.asked:
                continue
            if name not in self.tasks:
                others = {
                    port
                    for other in self.running.services.values()
                    if other is not record
                    for port in other.ports.values()
                }
                chosen: dict[str, int] = {}
                for port_name in SERVICE_SPECS[record.name].ports:
                    chosen[port_name] = lease.ports.get(port_name) or ports.choose(
                        f"{self.state.path}::{record.name}::{port_name}",
                        record.ports.get(port_name),
                        others | set(chosen.values()) | set(lease.ports.values()),
                    )
                record.ports, record.arguments, record.answered = chosen, lease.arguments, lease.asked
                record.status, record.detail, record.restarts, record.url = "starting", "", 0, ""
                monitor = ServiceMonitor(
                    self.state, record, self.environment, self.directory, self.publish, lease.asked
                )
                self.monitors[record.name] = monitor
                self.tasks[record.name] = asyncio.create_task(monitor.keep())
            elif not self.tasks[name].cancelling():
                self.monitors[name].ask(lease.asked)

    def _retire(self, supervision: TextIO) -> bool:
        """End supervision, unless a lease arrived at the last moment. Holds the lock, so that none is missed."""
        if not self.state.path.exists():
            return True
        with self.state.lock():
            if self.state.wanted().services:
                return False
            supervision.close()
        log.info("nothing is wanted any more")
        return True

    def publish(self) -> None:
        try:
            self.state.write_running(self.running)
        except OSError as error:
            log.warning("the state cannot be written: %s", error)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    state = StateDirectory(sys.argv[1])
    # A client that asks whether a supervisor lives holds the lock for an instant: only a lock that stays is another's
    for _ in range(20):
        if supervision := state.take_supervision():
            break
        time.sleep(0.05)
    else:
        log.info("another supervisor has %s", state.path)
        return
    if orphans := processes.members(state):
        log.warning("ending %d processes that an earlier supervisor left", len(orphans))
        processes.end(lambda: processes.members(state), grace_seconds=ORPHAN_GRACE_SECONDS)
    running = RunningServices(os.getpid(), boot_id(), state.running().services)
    for record in running.services.values():
        record.status, record.pid, record.process_group, record.answered = "stopped", 0, 0, 0
    supervisor = Supervisor(state, running)
    supervisor.publish()
    asyncio.run(supervisor.serve(supervision))


if __name__ == "__main__":
    main()
