"""Keep one service alive: start, wait for health, watch, restart on the same ports, end.

    starting ──healthy──> ready ──died or unresponsive──> restarting ──healthy──> ready
        └─died soon, time out──> failed <──too many restarts─┘

Invariant: when `keep` has returned or was cancelled, no process of the service is left.

A service that never became ready is not retried, because its log has a cause that would recur. A service that worked,
or waited in vain for a part of itself (`ServiceSpec.part_seconds`), gets `RESTARTS` more starts with growing pauses;
after `STEADY_SECONDS` of work, it has all of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import getpid
from urllib.parse import urlsplit

from roundhouse.cpu import slowness
from roundhouse.infra import processes
from roundhouse.infra.service_specs import SERVICE_SPECS, Launch, service_environment
from roundhouse.infra.state import ServiceRecord, StateDirectory
from roundhouse.retry import Backoff
from roundhouse.store.process_identity import birth

log = logging.getLogger(__name__)

RESTARTS = 5
STEADY_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.5
PROBE_INTERVAL_SECONDS = 5.0
UNRESPONSIVE_SECONDS = 90.0
"""A live process that answers no probe this long is restarted. Generous: a machine may be busy compiling or swapping."""
LOG_BYTES = 10 * 2**20
"""A longer log is moved to `<name>.log.1` at the next start."""


@dataclass
class ServiceMonitor:
    """One service under supervision."""

    state: StateDirectory
    record: ServiceRecord
    environment: Mapping[str, str]
    directory: str
    publish: Callable[[], None]
    """Called after every change of the record."""
    asked: int = 0
    """Number of the newest request; the record takes it over once the service has been seen to be healthy since."""
    _newly_asked: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, request: int) -> None:
        """Look at the service at once for a newer request."""
        if request > self.asked:
            self.asked = request
            self._newly_asked.set()

    async def keep(self) -> None:
        """Runs until the service has failed for good or the task is cancelled."""
        try:
            while True:
                process = self._start()
                began = time.monotonic()
                if not await self._becomes_healthy(process):
                    waited = time.monotonic() - began >= SERVICE_SPECS[self.record.name].part_seconds
                    if self.record.restarts == 0 and not (waited and process.poll() is not None):
                        break
                else:
                    await self._watch(process)
                log.warning("%s: %s", self.record.name, self.record.detail)
                if self.record.restarts >= RESTARTS:
                    self.record.detail += f" It was restarted {RESTARTS} times; roundhouse gave up."
                    break
                self.record.restarts += 1
                self._set("restarting")
                await self._end(grace_seconds=0)
                process.wait()
                await asyncio.sleep(Backoff(FIRST_PAUSE_SECONDS).pause(self.record.restarts))
        except OSError as error:
            self.record.detail = f"It could not be started: {error}"
        finally:
            cancelled = bool((task := asyncio.current_task()) and task.cancelling())
            if cancelled:
                self._set("stopping")
            await self._end()
            self.record.answered = self.asked
            self._set("stopped" if cancelled else "failed")

    def _start(self) -> subprocess.Popen[bytes]:
        record, spec = self.record, SERVICE_SPECS[self.record.name]
        launch = spec.launch(self.state, record.ports)
        environment = service_environment(record.name, launch, self.environment)
        environment[processes.MARK] = processes.mark(self.state, record.name)
        path = self.state.log(record.name)
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        record.started_at, record.ready_seconds, record.url, record.log = time.time(), None, launch.url, str(path)
        command = [*launch.command, *record.arguments]
        with path.open("ab") as output:
            output.write(f"\n--- started {time.strftime('%Y-%m-%d %H:%M:%S')}: {' '.join(command)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "roundhouse.die_with_parent", str(getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.directory,
                start_new_session=True,
            )
        record.pid = record.process_group = process.pid
        record.born = birth(process.pid) or 0.0
        self._launch = launch
        self._set("restarting" if record.restarts else "starting")
        return process

    async def _becomes_healthy(self, process: subprocess.Popen[bytes]) -> bool:
        began, limit = time.monotonic(), SERVICE_SPECS[self.record.name].start_seconds
        while time.monotonic() - began < limit * slowness():
            if process.poll() is not None:
                self.record.detail = f"It ended with exit code {process.returncode} before it was ready."
                return False
            if await probe(self._launch):
                self.record.ready_seconds = round(time.monotonic() - began, 2)
                self.record.answered = self.asked
                self._set("ready")
                return True
            await asyncio.sleep(0.1)
        self.record.detail = f"It did not answer {self._launch.url}{self._launch.probe} within {limit:.0f} s."
        return False

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the service has died or stopped answering, with the cause in the record."""
        ready = answered = probed = time.monotonic()
        while process.poll() is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._newly_asked.wait(), 0.2)
            self._newly_asked.clear()
            now = time.monotonic()
            if self.record.restarts and now - ready > STEADY_SECONDS:
                self.record.restarts = 0
                self._set("ready")
            request, due = self.asked, now - probed > PROBE_INTERVAL_SECONDS
            if not due and request == self.record.answered:
                continue
            probed = now
            if await probe(self._launch):
                answered = now
                if request > self.record.answered:
                    self.record.answered = request
                    self._set("ready")
            elif now - answered > UNRESPONSIVE_SECONDS:
                self.record.detail = f"It was alive but answered nothing for {UNRESPONSIVE_SECONDS:.0f} s."
                return
        self.record.detail = f"It ended with exit code {process.returncode} while in use."

    async def _end(self, grace_seconds: float | None = None) -> None:
        name = self.record.name
        grace = SERVICE_SPECS[name].grace_seconds if grace_seconds is None else grace_seconds
        left = await asyncio.to_thread(
            processes.end, lambda: processes.members(self.state, name), grace_seconds=grace, first=[self.record.pid]
        )
        if left:
            log.error("%s: processes %s cannot be ended", name, left)

    def _set(self, status: str) -> None:
        self.record.status = status  # type: ignore[assignment]
        log.info("%s is %s", self.record.name, status)
        self.publish()


async def probe(launch: Launch, time_limit: float = 5.0) -> bool:
    """Does the service answer its health route? A plain HTTP/1.0 request: the supervisor stays small and needs no client."""
    parts = urlsplit(launch.url)
    headers = {"Host": parts.netloc, "Connection": "close", **launch.headers}
    lines = [f"GET {launch.probe} HTTP/1.0", *(f"{key}: {value}" for key, value in headers.items()), "", ""]
    writer = None
    try:
        async with asyncio.timeout(time_limit):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write("\r\n".join(lines).encode())
            status = (await reader.readline()).split()
        return len(status) > 1 and status[1].isdigit() and int(status[1]) < launch.healthy_below
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
