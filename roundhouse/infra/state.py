"""Files of the local services: their leases (`wanted.json`) and their state (`services.json`).

Invariant: a service is wanted exactly as long as it has a lease. Clients write leases under the state lock; only the
supervisor writes the services' state, and it holds `supervisor.lock` during its life, because a process number alone
may have been reused.

    <state>/wanted.json      leases: service -> holders, fixed ports, arguments, number of the newest request
    <state>/services.json    running services: process, ports, addresses, log, status; ports stay on record after a stop
    <state>/engine.json      the run that has its turn with the engine of these services
    <state>/handover.json    environment of the newest request, readable by the owner alone, removed once taken over
    <state>/ray_token        secrets of Ray's cluster and of Prefect's API, readable by the owner alone
    <state>/prefect_auth_string, prefect.html: the second opens Prefect's page with the first
    <state>/logs/            one log a service, and the supervisor's
    <state>/{prefect,mlflow,ray}/  their data
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TextIO

from roundhouse.errors import InfraError
from roundhouse.store.process_identity import birth, is_alive

PREFECT_AUTH_FILE, PREFECT_SIGN_IN_FILE = "prefect_auth_string", "prefect.html"
Status = Literal["starting", "ready", "restarting", "failed", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class ServiceHolder:
    """Holder of a service: a person (`user`), an ended run that left the pages up (`kept`), or a live process."""

    kind: Literal["user", "kept", "process"]
    pid: int = 0
    born: float = 0.0
    """`process_identity.birth` of the process."""

    @classmethod
    def this_process(cls) -> ServiceHolder:
        return cls.of_process(os.getpid())

    @classmethod
    def of_process(cls, pid: int) -> ServiceHolder:
        born = birth(pid)
        if born is None:
            raise InfraError(f"No process {pid} is alive that could own the services. Pass the number of one.")
        return cls("process", pid, born)

    def alive(self) -> bool:
        return self.kind != "process" or is_alive(self.pid, self.born)


@dataclass(slots=True)
class ServiceLease:
    """Leases and settings of one service."""

    holders: list[ServiceHolder]
    asked: int
    """Number of the newest request for it."""
    ports: dict[str, int] = field(default_factory=dict)
    """Ports that the caller fixed."""
    arguments: list[str] = field(default_factory=list)
    """More arguments of its command."""


@dataclass(slots=True)
class WantedServices:
    """All leases."""

    revision: int = 0
    services: dict[str, ServiceLease] = field(default_factory=dict)


@dataclass(slots=True)
class ServiceRecord:
    """State of one service."""

    name: str
    status: Status = "stopped"
    pid: int = 0
    process_group: int = 0
    """Also its session: every process of the service belongs to it unless it left on purpose."""
    born: float = 0.0
    """`process_identity.birth` of the process `pid`."""
    started_at: float = 0.0
    """Seconds since the epoch, of the newest start."""
    ready_seconds: float | None = None
    """From that start to the first healthy answer."""
    ports: dict[str, int] = field(default_factory=dict)
    url: str = ""
    log: str = ""
    arguments: list[str] = field(default_factory=list)
    restarts: int = 0
    """Restarts after a crash since it was last asked for."""
    detail: str = ""
    """Why it failed or was restarted."""
    answered: int = 0
    """Number of the newest request that this record reflects."""


@dataclass(slots=True)
class RunningServices:
    """The supervisor's report."""

    supervisor_pid: int = 0
    boot_id: str = ""
    services: dict[str, ServiceRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Present user of the engine."""

    run_id: str
    holder: ServiceHolder


class StateDirectory:
    """One directory of services; two runs that name the same directory share its services."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()

    def create(self) -> None:
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise InfraError(
                f"The service directory {self.path} cannot be written ({error}). Make it writable or set infra.state."
            ) from error

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held while leases change. Nothing slow happens under it."""
        with (self.path / "state.lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def take_supervision(self) -> TextIO | None:
        """The open lock of the one supervisor, or None when another has it."""
        handle = (self.path / "supervisor.lock").open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            return None
        return handle

    def supervised(self) -> bool:
        """Is a supervisor alive?"""
        if not (self.path / "supervisor.lock").exists():
            return False
        handle = self.take_supervision()
        if handle is None:
            return True
        handle.close()
        return False

    def wanted(self) -> WantedServices:
        data = self._read("wanted.json")
        leases = {
            name: ServiceLease(**{**lease, "holders": [ServiceHolder(**holder) for holder in lease["holders"]]})
            for name, lease in data.get("services", {}).items()
        }
        return WantedServices(data.get("revision", 0), leases)

    def wishes_changed(self) -> int:
        """When `wanted.json` was last written, in nanoseconds; 0 without one."""
        try:
            return (self.path / "wanted.json").stat().st_mtime_ns
        except OSError:
            return 0

    def write_wanted(self, wanted: WantedServices) -> None:
        self._write("wanted.json", asdict(wanted))

    def running(self) -> RunningServices:
        data = self._read("services.json")
        known = {item.name for item in fields(ServiceRecord)}
        services = {
            name: ServiceRecord(**{key: value for key, value in record.items() if key in known})
            for name, record in data.get("services", {}).items()
        }
        return RunningServices(data.get("supervisor_pid", 0), data.get("boot_id", ""), services)

    def write_running(self, running: RunningServices) -> None:
        self._write("services.json", asdict(running))

    def engine_use(self) -> EngineUse | None:
        data = self._read("engine.json")
        return EngineUse(data["run_id"], ServiceHolder(**data["holder"])) if data else None

    def write_engine_use(self, use: EngineUse | None) -> None:
        self._write("engine.json", {} if use is None else asdict(use))

    def hand_over(self, environment: dict[str, str]) -> None:
        self._write("handover.json", {"environment": environment, "directory": os.getcwd()})

    def take_over(self) -> tuple[dict[str, str], str] | None:
        """Environment and working directory of the newest request, once."""
        data = self._read("handover.json")
        if not data:
            return None
        (self.path / "handover.json").unlink(missing_ok=True)
        return data["environment"], data["directory"]

    def _read(self, name: str) -> dict[str, Any]:
        """A damaged file counts as absent: a machine that lost power must not need a person to clean up."""
        try:
            data = json.loads((self.path / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return data if isinstance(data, dict) else {}

    def _write(self, name: str, data: dict[str, Any]) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        with os.fdopen(descriptor, "w") as file:
            json.dump(data, file, indent=2)
        Path(temporary).replace(self.path / name)
