"""Run collected tests in worker processes that are forks of the process that collected them.

Invariant: each collected test runs in exactly one worker, and its reports reach the collecting process in the order of its
phases.

Collecting the suite imports the whole product, 12 to 26 CPU seconds. A fork has it all at once. The collecting process runs no
test itself, so it can fork a replacement when a test ends its worker:

    collecting process ──fork──> worker 1, worker 2        a worker asks for a group of tests, and sends the reports of each
                       ──fork──> tests/fork_server.py      programs that a test starts with everything imported

A group is a file, or files that share a costly fixture. A worker asks for its next group before the last test of the current
one, so that fixtures of the session outlive the group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
from _pytest.capture import FDCapture

GRACE_SECONDS = 60.0
"""Time for the workers to tear their fixtures down after Ctrl-C."""

PR_SET_PDEATHSIG = 1

Group = list[int]
"""Places of tests in `session.items`."""


@dataclass
class Worker:
    """The collecting process's view of one worker."""

    number: int
    pid: int
    connection: Connection
    assigned: deque[int] = field(default_factory=deque)
    """Tests that the worker has and has not finished, in their order."""


class ForkedWorkers:
    """The loop over the tests, for `count` workers."""

    def __init__(self, count: int, group_of: Callable[[str], str]) -> None:
        self._count = count
        self._group_of = group_of
        self._status = int(pytest.ExitCode.INTERNAL_ERROR)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or not session.items:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        Run(session, self._groups(session.items), min(self._count, len(session.items))).run()
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End without taking down a heap of everything that was imported, which takes a second and prints leaks."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._status)

    def _groups(self, items: Sequence[pytest.Item]) -> list[Group]:
        groups: dict[str, Group] = {}
        for place, item in enumerate(items):
            groups.setdefault(self._group_of(item.nodeid), []).append(place)
        return list(groups.values())


class Run:
    """One pass over all groups."""

    def __init__(self, session: pytest.Session, groups: list[Group], count: int) -> None:
        self._session = session
        self._waiting = deque(groups)
        self._count = count
        self._workers: dict[Connection, Worker] = {}

    def run(self) -> None:
        try:
            for number in range(self._count):
                self._start(number)
            while self._workers and not self._session.shouldfail:
                for connection in wait(list(self._workers), timeout=1.0):
                    self._serve(self._workers[connection])  # type: ignore[index]
                self._replace_ended()
        finally:
            self._end_all()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _start(self, number: int) -> None:
        ours, theirs = Pipe()
        base = self._session.config._tmp_path_factory.getbasetemp() / f"worker-{number}"
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self._workers):
                connection.close()
            _work(self._session, theirs, base)
        theirs.close()
        self._workers[ours] = Worker(number, pid, ours)

    def _serve(self, worker: Worker) -> None:
        """Take one message of a worker; without one, its process ends."""
        try:
            kind, content = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._lose(worker)
            return
        hook = self._session.config.hook
        if kind == "report":
            hook.pytest_runtest_logreport(
                report=hook.pytest_report_from_serializable(config=self._session.config, data=content)
            )
        elif kind == "finished":
            worker.assigned.remove(content)
        elif kind == "error":
            pytest.exit(f"worker {worker.number} has failed:\n{content}", returncode=3)
        elif kind == "ask":
            stop = self._session.shouldfail or self._session.shouldstop
            group = None if stop or not self._waiting else self._waiting.popleft()
            worker.assigned.extend(group or ())
            worker.connection.send(group)

    def _replace_ended(self) -> None:
        """Notice workers that ended while one of their programs still holds the connection."""
        for worker in list(self._workers.values()):
            ended, _ = os.waitpid(worker.pid, os.WNOHANG)
            if ended and not worker.connection.poll():
                self._lose(worker, waited=True)

    def _lose(self, worker: Worker, waited: bool = False) -> None:
        """Report the test that ended its worker, and let another worker run the rest."""
        if not waited:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
        del self._workers[worker.connection]
        worker.connection.close()
        if not worker.assigned:
            return
        crashed = self._session.items[worker.assigned.popleft()]
        report = pytest.TestReport(
            crashed.nodeid, crashed.location, {}, "failed", f"its worker ended while it ran {crashed.nodeid}", "call"
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if worker.assigned:
            self._waiting.appendleft(list(worker.assigned))
        if not (self._session.shouldfail or self._session.shouldstop):
            self._start(worker.number)

    def _end_all(self) -> None:
        """Wait for workers that Ctrl-C has reached, interrupt the others, and kill them after the grace time."""
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        for worker in self._workers.values():
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.05)


class Sender:
    """Send reports of a worker's tests to the collecting process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def _work(session: pytest.Session, connection: Connection, base: Path) -> None:
    """Run tests in a fork until the collecting process has no more, or ends. Never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    code = 0
    config = session.config
    try:
        _have_own_terminal(config)
        _have_own_capture(config)
        base.mkdir(exist_ok=True)
        config._tmp_path_factory._basetemp = base
        config.pluginmanager.register(Sender(config, connection))
        places = _places(connection)
        place = next(places, None)
        while place is not None:
            following = next(places, None)
            item, next_item = session.items[place], None if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            connection.send(("finished", place))
            if session.shouldfail or session.shouldstop:
                break
            place = following
    except BrokenPipeError:
        code = 1
    except BaseException as error:  # noqa: BLE001, the collecting process reports it
        code = 1
        if not isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(OSError):
                connection.send(("error", traceback.format_exc()))
    finally:
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _places(connection: Connection) -> Iterator[int]:
    while True:
        connection.send(("ask", None))
        group = connection.recv()
        if group is None:
            return
        yield from group


def _have_own_terminal(config: pytest.Config) -> None:
    """Write nothing to the terminal of the collecting process, which prints the reports."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reporter._tw._file = io.TextIOWrapper(io.FileIO(os.devnull, "w"))


def _have_own_capture(config: pytest.Config) -> None:
    """Give this fork separate capture files. Loggers keep the stream objects of their import."""
    capturing = config.pluginmanager.getplugin("capturemanager")._global_capturing
    for stream in (capturing.out, capturing.err):
        if isinstance(stream, FDCapture):
            own = os.memfd_create("captured")
            os.dup2(own, stream.tmpfile.fileno())
            os.dup2(own, stream.targetfd)
            os.close(own)
