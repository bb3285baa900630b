"""One driver per run: a lease decides which process may write.

    <run>/lease/000001.json     record of the first driver, rewritten by it alone while it drives
    <run>/lease/000002.json     record of the second, which found the first gone

Invariants: the driver of a run is the process with the highest number in its record, its *token*. Creating the record
claims the token and succeeds for one of several processes (a link on a disk, If-None-Match in a bucket); tokens are not
reused. Before each commit, the driver checks that the next token is free; otherwise it stops with `LeaseLost`.

No two clocks are compared. A waiting driver sees the record change (its writer lives: `RunDriven`), or measures that it
stays unchanged and claims the next token. A record is over at once if it was returned, or if its process on this
machine is gone.

Worker processes of a driver (a training step, shards of a collection, as children or Jobs) commit nothing: their files
have separate names and count once the driver commits them. The next driver can therefore take over a running Job.

Ten times a second a driver also writes its working time and CPU time into a temporary file of this machine. The next
driver here adds this figure of a killed process to its record.

A driver that is paused exactly between its check and the creation of a manifest still commits that one stage under its
old token; the other driver receives this result, as after any two writers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from roundhouse.activity import announce
from roundhouse.cpu import programs_seconds
from roundhouse.errors import ConfigError, StoreError
from roundhouse.store.location import AlreadyExists, Location, NotFound
from roundhouse.store.process_identity import birth, boot_id, is_alive

logger = logging.getLogger(__name__)

DIRECTORY = "lease"
SECONDS = 60.0
"""A record that was not rewritten for so long is over. ROUNDHOUSE_STORE_LEASE_SECONDS changes it, for a driver's own."""
_RENEWALS = 6
"""In that time; all but one may come late."""
_LOOK_SECONDS = 1.0
_METER_SECONDS = 0.1
_METERED = struct.Struct("ddd")
_RECORD = re.compile(r"(\d{6,})\.json")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class LeaseRecord(BaseModel):
    """A driver's record."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token: int
    nonce: str
    """Distinguishes the driver from drivers of a deleted run with the same ID."""
    host: str
    pid: int
    born: float | None
    """When the process began, in the machine's own terms (`roundhouse.store.process_identity.birth`)."""
    machine: str
    """Start of the machine and space of process numbers in which `pid` means something."""
    since: float
    """Seconds since the epoch, by the driver's clock; for people."""
    seconds: float
    """Unchanged for so long, the record is over."""
    renewals: int = 0
    cpu_seconds: float = 0.0
    """CPU seconds of the driver's process and its programs on this machine (`roundhouse.cpu`) since it claimed the
    token, at the last renewal. For a killed driver, the last tenth of a second is missing; without a later driver on
    this machine, up to a sixth of `seconds`."""
    lost_cpu_seconds: float = 0.0
    """Part of these that programs without a result used."""
    wall_seconds: float = 0.0
    """Since it claimed the token, by its own clock, as exactly as `cpu_seconds`; 0 in a record of an older version."""
    released: bool = False

    @property
    def is_over(self) -> bool:
        """Return whether the driver is known to be gone: it returned the lease, or was a process of this machine that
        has ended."""
        return self.released or (not self.is_elsewhere and self.born is not None and not is_alive(self.pid, self.born))

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the driver is a process of another machine or pod: its end is not visible from here."""
        return self.machine != _machine()

    def __str__(self) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {moment}"


class RunDriven(StoreError):
    """Another process drives this run."""


class LeaseLost(StoreError):
    """Another process drives this run now, since this one did not renew its lease."""


class Fence(BaseModel):
    """The token that a driver, and the processes that work for it, act under."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    """URI of the run's directory."""
    token: int
    nonce: str

    def check(self) -> None:
        """Look whether the token still is the run's newest.

        Raises:
            LeaseLost: it is not; the text names the process that drives the run.
        """
        place = Location(self.run) / DIRECTORY
        later, own = _read(place, self.token + 1), _read(place, self.token)
        if later is not None or own is None or own.nonce != self.nonce:
            if (newest := _newest(place)) is None:
                raise LeaseLost(f"{self.run} was deleted while this process drove it; the process writes nothing more.")
            raise LeaseLost(
                f"Another process drives {self.run} now: {newest}. This process lost its lease because it was suspended or "
                "could not reach the store. It stops and writes nothing more. The other one resumes the run. "
                "To continue here, stop the other one and run this command again."
            )


class Lease:
    """A claimed token, renewed in the background until it is returned."""

    def __init__(self, run: Location, record: LeaseRecord) -> None:
        self.fence = Fence(run=run.uri, token=record.token, nonce=record.nonce)
        self._place = run / DIRECTORY
        self._record = record
        self._began = _used()
        self._meter = _Meter(record)
        self._error: LeaseLost | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease {record.token}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def renew(self) -> None:
        """Rewrite the record.

        Raises:
            LeaseLost: another process drives the run.
        """
        self.check()
        self._record = self._record.model_copy(update={"renewals": self._record.renewals + 1, **self._used()})
        _write(self._place, self._record)

    def check(self) -> None:
        """Check as `Fence.check` does; a lost lease stays lost."""
        self.refuse_lost()
        try:
            self.fence.check()
        except LeaseLost as error:
            self._error = error
            raise

    def refuse_lost(self) -> None:
        """Check as `check` does, without reading the store."""
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Give it back, so that the next driver need not wait."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
        with contextlib.suppress(LeaseLost):
            self.check()
            _write(self._place, self._record.model_copy(update={"released": True, **self._used()}))
        self._meter.remove()

    def _used(self) -> dict[str, float]:
        """Fields of the record."""
        seconds = zip(_MEASURED, _used(), self._began, strict=True)
        return {name: round(now - before, 3) for name, now, before in seconds}

    def _keep(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(_METER_SECONDS):
            self._meter.write(self._used())
            if time.monotonic() - renewed < self._record.seconds / _RENEWALS:
                continue
            renewed = time.monotonic()
            try:
                self.renew()
            except LeaseLost as error:
                logger.error("%s", error)
                return
            except StoreError as error:
                logger.warning("The lease of %s is not renewed, the next try follows: %s", self.fence.run, error)


class _Meter:
    """CPU and wall seconds of a driver, in a file that its nonce names: memory of the system, which a killed process leaves."""

    def __init__(self, record: LeaseRecord) -> None:
        self._path = Path(tempfile.gettempdir()) / f"roundhouse-driver-{record.nonce}"

    def write(self, used: dict[str, float]) -> None:
        """Replace the record. Ignore errors such as a full disk, because they must not stop a driver."""
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(file, _METERED.pack(*(used[name] for name in _MEASURED)), 0)
            finally:
                os.close(file)

    def read(self) -> dict[str, float]:
        """Return the fields of the record; empty if it was not written."""
        try:
            if self._path.lstat().st_uid != os.getuid():
                return {}
            return dict(zip(_MEASURED, _METERED.unpack(self._path.read_bytes()), strict=True))
        except (OSError, struct.error):
            return {}

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _metered(record: LeaseRecord) -> LeaseRecord:
    """The record of a driver of this machine that was killed, with all that its meter has."""
    if record.released or not record.is_over:
        return record
    fields = _Meter(record).read()
    return record.model_copy(update={name: max(value, getattr(record, name)) for name, value in fields.items()})


class LeaseWatch:
    """A waiting driver's observation of another driver's record."""

    def __init__(self) -> None:
        self._seen: tuple[str, int] | None = None
        self._silent = 0.0

    def is_over(self, holder: LeaseRecord, seconds: float) -> bool:
        """Return whether the next record may follow this one, `seconds` after the last check.

        A late check, because this process was paused or the store did not answer, counts as a timely one: the other
        driver may have been paused for the same reason.

        Raises:
            RunDriven: the record was renewed in the meantime.
        """
        mark = (holder.nonce, holder.renewals)
        if self._seen is None or self._seen[0] != holder.nonce:
            self._seen, self._silent = mark, 0.0
        elif mark != self._seen:
            raise RunDriven(
                f"Another process drives this run and has just renewed its lease: {holder}. One driver a run: wait for its "
                "end, end it there (Ctrl-C, or roundhouse runs cancel), or take another run_id. Should it be lost, the same "
                f"command takes over {holder.seconds:.0f} s after its last renewal."
            )
        else:
            self._silent += min(seconds, 2 * _pause(holder))
        return holder.is_over or self._silent > holder.seconds


def _announce(line: str) -> None:
    announce("waiting", text=line)


def holder(run: Location) -> LeaseRecord | None:
    """Return the driver of the run of this directory, or None. A driver that was lost on another machine is still
    named, because one check cannot detect its end."""
    newest = _newest(run / DIRECTORY)
    return None if newest is None or newest.is_over else newest


def all_drivers(run: Location) -> list[LeaseRecord]:
    """The records of all drivers that the run has had, the first one first."""
    newest = _newest(run / DIRECTORY)
    tokens = range(1, 1 + (0 if newest is None else newest.token))
    return [_metered(record) for token in tokens if (record := _read(run / DIRECTORY, token)) is not None]


def fence_of(run: Location) -> Fence | None:
    """Return this process's fence for the run; None if it does not drive the run."""
    lease = _held.get(run.uri)
    return None if lease is None else lease.fence


def refuse_lost(run: Location) -> None:
    """Stop work for a run if this process is known to have lost its lease, without reading the store.

    Raises:
        LeaseLost: the text names the process that drives it now.
    """
    if (lease := _held.get(run.uri)) is not None:
        lease.refuse_lost()


@contextlib.contextmanager
def driving(run: Location, say: Callable[[str], None] = _announce) -> Iterator[Lease]:
    """Drive the run in the block. A nested block of this process for the same run shares the lease.

    Args:
        say: called with a line if another driver's record has to be watched first.

    Raises:
        RunDriven: another process drives the run.
    """
    if (outer := _held.get(run.uri)) is not None:
        yield outer
        return
    lease = _held[run.uri] = take(run, say)
    lease.start()
    try:
        yield lease
    finally:
        del _held[run.uri]
        try:
            lease.release()
        except StoreError as error:  # the block's exception, if any, is the error to report
            logger.warning("The lease of %s is not given back and is over by itself: %s", run.uri, error)


def take(run: Location, say: Callable[[str], None] = _announce) -> Lease:
    """Claim the next token, once the newest one's record is over.

    Raises:
        RunDriven: that one is renewed.
    """
    watch, looked, announced = LeaseWatch(), time.monotonic(), ""
    while True:
        now = time.monotonic()
        lease, other = try_to_take(run, watch, now - looked)
        if lease is not None:
            return lease
        looked = now
        if other is not None:
            if announced != other.nonce:
                announced = other.nonce
                say(f"The run was driven by {other}; waiting up to {other.seconds:.0f} s to see whether it still is.")
            time.sleep(_pause(other))


def try_to_take(run: Location, watch: LeaseWatch, seconds: float) -> tuple[Lease | None, LeaseRecord | None]:
    """Try to take the lease, `seconds` after the last try. Return the lease or the record to watch; neither if another
    process was faster.

    Raises:
        RunDriven: see `take`.
    """
    place = run / DIRECTORY
    newest = _newest(place)
    if newest is not None and not watch.is_over(newest, seconds):
        return None, newest
    value = os.environ.get("ROUNDHOUSE_STORE_LEASE_SECONDS")
    try:
        limit = SECONDS if value is None else float(value)
    except ValueError:
        limit = -1.0
    if not 1 <= limit <= 3600:
        raise ConfigError(f"ROUNDHOUSE_STORE_LEASE_SECONDS is {value!r}: give seconds, 1 to 3600.")
    record = LeaseRecord(
        token=1 if newest is None else newest.token + 1,
        nonce=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=birth(os.getpid()),
        machine=_machine(),
        since=time.time(),
        seconds=limit,
    )
    try:
        place.create(_name(record.token), record.model_dump_json().encode())
    except AlreadyExists:
        return None, None
    if (
        newest is not None and (settled := _metered(newest)) != newest
    ):  # this driver is the only one now that may write it
        _write(place, settled)
        _Meter(newest).remove()
    return Lease(run, record), None


def _newest(place: Location) -> LeaseRecord | None:
    """The record of the highest token. A listing may be late, so the ones after it are asked for by name."""
    listed = [int(match[1]) for name in place.names() if (match := _RECORD.fullmatch(name)) is not None]
    newest = _read(place, max(listed, default=0))
    while (later := _read(place, 1 if newest is None else newest.token + 1)) is not None:
        newest = later
    return newest


def _read(place: Location, token: int) -> LeaseRecord | None:
    try:
        return LeaseRecord.model_validate_json(place.read(_name(token)))
    except NotFound:
        return None
    except ValueError as error:
        raise StoreError(
            f"{place.uri}/{_name(token)} is damaged: {error}. Delete it when no process drives the run."
        ) from error


def _write(place: Location, record: LeaseRecord) -> None:
    place.write(_name(record.token), record.model_dump_json().encode())


def _name(token: int) -> str:
    return f"{token:06d}.json"


def _pause(holder: LeaseRecord) -> float:
    return min(_LOOK_SECONDS, holder.seconds / _RENEWALS)


_MEASURED = ("cpu_seconds", "lost_cpu_seconds", "wall_seconds")
"""Fields of a record that its driver measures, in the order of `_used`."""


def _used() -> tuple[float, float, float]:
    """CPU seconds of this process and its programs; of its lost programs; seconds of a clock."""
    of_programs, lost = programs_seconds()
    return time.process_time() + of_programs, lost, time.monotonic()


def _machine() -> str:
    """Process numbers of two containers on one machine mean different processes."""
    space = os.readlink(_PID_NAMESPACE) if _PID_NAMESPACE.exists() else ""
    return f"{boot_id()} {space}".strip()


_held: dict[str, Lease] = {}
"""Leases of this process by the run's URI."""
