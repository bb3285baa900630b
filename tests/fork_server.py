"""Start Python programs as forks of one process that has only done imports.

Invariant: a program is a separate process, and its state ends with it; it shares only imported modules with its siblings.
Nine tenths of a program's start are imports, 3.6 CPU seconds with the trainer; a fork takes a tenth of a second.

    process = fork_server.start([sys.executable, "-m", "roundhouse.cli", "train", "run.yaml"], env=environment, stdout=PIPE)
    process.wait()                    # otherwise like a `subprocess.Popen`

The suite's server is a fork of the process that collected the tests (`tests/workers.py`). `ForkServer.spawn` starts another
server with a separate environment for its imports.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import json
import logging
import os
import random
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

RUN = (
    "roundhouse_flows.train",
    "roundhouse_flows._prefect.delivery",
    "mlflow.tracking",
    "roundhouse.cli",
    "roundhouse.console",
    "roundhouse.generation.standalone",
    "roundhouse.generation.transformers_engine",
    "roundhouse.plugins.nemo_gym.servers.resources",
    "roundhouse.plugins.nemo_gym.clients.resources",
    "roundhouse.training.trainer",
    "roundhouse.training.service.verbs",
    "transformers.models.qwen3.modeling_qwen3",
    "s3fs",
)
"""Modules that a run imports, its servers and its trainer included."""

VARIABLE = "ROUNDHOUSE_TEST_FORK_SERVER"
"""Environment variable with the socket of the suite's server."""

STDIN_TO_STDERR = 3


Popen: Any = subprocess.Popen
"""Without its types, which leave out the methods that a fork server replaces."""


class ForkedProgram(Popen):
    """A program started by a fork server: its parent is the server, everything else is as for a child of this process."""

    returncode: int | None

    def __init__(self, server: ForkServer, command: Sequence[str], **options: Any) -> None:
        self._server = server
        super().__init__(list(command), **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,  # type: ignore[no-untyped-def]
                       p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest) -> None:  # fmt: skip
        order = {
            "command": [str(word) for word in args],
            "directory": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "new_session": bool(rest[5]),  # start_new_session
        }
        descriptors = [own if given == -1 else given for given, own in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        self.pid = self._server.ask(order, descriptors)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            except OSError:  # the server has ended, and its programs with it
                self.returncode = _deadstate
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not wait_flags & os.WNOHANG:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(self.pid)
                select.select([descriptor], [], [])
                os.close(descriptor)
        status = self._server.ask({"status_of": self.pid})
        return (0, 0) if status is None else (self.pid, status)


class ForkServer:
    """Connection to a fork server."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._replies = self._socket.makefile("r")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def spawn(cls, log: Path, environment: dict[str, str], imports: Sequence[str] = RUN) -> ForkServer:
        """Start a separate server. It ends at `close`, or after its last client."""
        address = str(Path(tempfile.mkdtemp(prefix="rh-fork-")) / "socket")
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", address, *imports],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        while not Path(address).exists():
            if process.poll() is not None:
                raise RuntimeError(f"the fork server has ended with {process.returncode}; see {log}")
            time.sleep(0.02)
        server = cls(address)
        server._process = process
        return server

    def start(self, module: str, arguments: Sequence[str], log: Path, environment: dict[str, str]) -> ForkedProgram:
        """Run a module as a program that writes to `log`."""
        with log.open("ab") as stream:
            command = [sys.executable, "-m", module, *arguments]
            return self.program(command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)

    def program(self, command: Sequence[str], **options: Any) -> ForkedProgram:
        """Start a Python command: `python -m module`, `python -c code`, or the `roundhouse` script."""
        return ForkedProgram(self, command, **options)

    def ask(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        message = json.dumps(order).encode()
        with self._lock:
            head = len(message).to_bytes(4, "big")
            if descriptors:
                socket.send_fds(self._socket, [head], list(descriptors))
            else:
                self._socket.sendall(head)
            self._socket.sendall(message)
            reply = self._replies.readline()
        if not reply:
            raise ConnectionError("the fork server has ended; see its log")
        return json.loads(reply)

    def close(self) -> None:
        self._replies.close()
        self._socket.close()
        if self._process is not None:
            self._process.wait(30)


_of_suite: dict[int, ForkServer] = {}
"""The connection of this process to the suite's server, by process ID: a fork needs a connection of its own."""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a Python command as `subprocess.Popen` does, by the suite's fork server."""
    address = os.environ.get(VARIABLE)
    if address is None:
        return subprocess.Popen(list(command), **options)
    if os.getpid() not in _of_suite:
        _of_suite[os.getpid()] = ForkServer(address)
    return _of_suite[os.getpid()].program(command, **options)


def run(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    input: str | bytes | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a Python command to its end as `subprocess.run` does, by the suite's fork server."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
    ended = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        ended.check_returncode()
    return ended


@contextlib.contextmanager
def suite_server() -> Iterator[None]:
    """Fork the suite's server from this process, which has collected the tests, and name it in the environment."""
    directory = tempfile.mkdtemp(prefix="rh-fork-")  # a TemporaryDirectory would be deleted when the first fork ends
    address = f"{directory}/socket"
    listener = _listen(address)
    lifeline, held = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(held)
        _end_with(lambda: _serve(listener, lifeline))
    listener.close()
    os.close(lifeline)
    os.environ[VARIABLE] = address
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        os.close(held)
        os.waitpid(server, 0)
        shutil.rmtree(directory)


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    return listener


def _serve(listener: socket.socket, lifeline: int | None) -> None:
    """Fork on demand, until the lifeline or the last client ends; programs of a client that ended are killed."""
    programs: dict[socket.socket, set[int]] = {}
    clients: dict[int, socket.socket] = {}
    statuses: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    if lifeline is not None:
        selector.register(lifeline, selectors.EVENT_READ)
    while True:
        ready = selector.select(timeout=1.0)
        _reap(programs, statuses)
        for key, _ in ready:
            if key.fileobj is listener:
                client, _ = listener.accept()
                programs[client], clients[client.fileno()] = set(), client
                selector.register(client, selectors.EVENT_READ)
                continue
            is_last = key.fd == lifeline
            if is_last or not _answer(clients[key.fd], programs[clients[key.fd]], statuses):
                for client in list(programs) if is_last else [clients[key.fd]]:
                    selector.unregister(client)
                    _kill(programs.pop(client))
                    client.close()
                if is_last or (lifeline is None and not programs):
                    return


def _reap(programs: dict[socket.socket, set[int]], statuses: dict[int, int]) -> None:
    """Keep the status of programs that have ended: a test may look at all processes before it asks for one."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid = ended[0]
            statuses[pid] = ended[1]
            for started in programs.values():
                started.discard(pid)


def _answer(client: socket.socket, programs: set[int], statuses: dict[int, int]) -> bool:
    """Take one order; return False if the client has ended."""
    try:
        head, descriptors, _, _ = socket.recv_fds(client, 4, STDIN_TO_STDERR)
        if len(head) < 4:
            return False
        message = b""
        while len(message) < int.from_bytes(head, "big"):
            part = client.recv(65536)
            if not part:
                return False
            message += part
        order = json.loads(message)
        if "command" in order:
            pid = os.fork()
            if pid == 0:
                _end_with(lambda: _become(order, descriptors))
            programs.add(pid)
            statuses.pop(pid, None)
            for descriptor in descriptors:
                os.close(descriptor)
            reply: int | None = pid
        else:
            reply = statuses.get(order["status_of"])
        client.sendall(json.dumps(reply).encode() + b"\n")
    except OSError:
        return False
    return True


def _kill(programs: set[int]) -> None:
    for pid in programs:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _end_with(program: Any) -> None:
    """Run the program of a fork and end the process with its exit code."""
    code = 70
    try:
        code = _exit_code(program)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code(program: Any) -> int:
    try:
        value = program()
        return value if isinstance(value, int) else 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    except Exception:  # noqa: BLE001, as of an interpreter, which prints it
        os.write(2, traceback.format_exc().encode())
        return 1
    finally:
        atexit._run_exitfuncs()


def _become(order: dict[str, Any], descriptors: list[int]) -> Any:
    """In the fork: take over streams, directory, environment and arguments, and run the program."""
    if order["new_session"]:
        os.setsid()
    faulthandler.disable()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(STDIN_TO_STDERR, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=os.isatty(1))
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.environ.pop(VARIABLE, None)
    tempfile.tempdir = None
    random.seed()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [order["directory"], *paths]
    _take_streams_and_settings()
    return _program(order["command"])


def _take_streams_and_settings() -> None:
    """Give loggers the program's streams, and Prefect the program's environment: both were taken when they were imported."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if vars(handler).get("stream") is not None and not isinstance(handler, logging.FileHandler):
                handler.stream = sys.stderr
                if hasattr(handler, "console"):
                    handler.console.file = sys.stderr
    if "prefect.context" in sys.modules:
        sys.modules["prefect.context"].refresh_global_settings_context()


def _program(command: list[str]) -> Any:
    interpreter, *rest = command
    if Path(interpreter).name == "roundhouse":
        rest = ["-m", "roundhouse.cli", *rest]
    option, subject, *arguments = rest
    if option == "-c":
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(subject, "<string>", "exec"), main.__dict__)
        return None
    if option != "-m":
        raise ValueError(f"a fork server runs -m and -c, not {command}")
    module = importlib.import_module(subject)
    sys.argv = [module.__file__ or subject, *arguments]
    if hasattr(module, "main"):
        return module.main()
    runpy.run_module(subject, run_name="__main__", alter_sys=True)
    return None


def main() -> None:
    """Import, then serve."""
    address, *imports = sys.argv[1:]
    for name in imports:
        importlib.import_module(name)
    partial = address + ".partial"
    listener = _listen(partial)
    os.rename(partial, address)
    _serve(listener, None)


if __name__ == "__main__":
    main()
