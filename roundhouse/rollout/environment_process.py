"""User code of an environment in a separate process, so that limits hold even if this code blocks.

Code that blocks stops its event loop, and with it every time limit of that loop. A thread cannot stop code that holds
the interpreter lock, such as a backtracking regular expression; only the end of its process can. Therefore `kind:
custom`, rubric functions, verifiers and workers run in processes that the collector starts, watches and replaces.
Built-in environments have bounded code and stay in the collector's process.

    blocks, lock released    the call ends at its limit; the process serves all other sessions in another thread
    blocks, lock held        the process is killed after `HELD_SECONDS` of CPU, or at the limit of the call, if that is sooner
    the process ends         the next call starts another one

Invariants
- Only the rollout of the blocked call fails. If the process is killed, the call fails as `EnvironmentBlocked`, which is
  not
  retried and names file and line. The other sessions of that process fail as `EnvironmentRestarted`: such an attempt
  does not
  count as a retry, and finished model calls are replayed.
- Code of a call may ask the collector, such as a worker for a model call: a message back, and an answer among other calls.
- A cancelled call leaves at most one thread in the environment's process. After `MOST_ABANDONED` of them the process
  gets no new
  session and ends with its last one.
- Results, errors and failure kinds equal those of the same environment in this process.

A call costs about 0.1 ms of CPU in both processes together (128 rollouts in flight; `make bench-hosted`). Environments
that do not define `seed_session` need no call at the start of a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import mmap
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import IO, Any

import psutil

from roundhouse.activity import ACTIVITY
from roundhouse.environments.host_messages import (
    ANSWER,
    CANCEL,
    DROP,
    OPEN,
    SHARED_BYTES,
    SLOT,
    Failure,
    failure_of,
    framed,
    framed_quickly,
    place_of,
    take_messages,
    typed_error,
)
from roundhouse.errors import DataError, InfraError
from roundhouse.rollout.protocol import (
    BadTaskRow,
    EnvironmentBlocked,
    EnvironmentLost,
    EnvironmentRestarted,
)
from roundhouse.user_code import message_of

log = logging.getLogger(__name__)

START_SECONDS = 600.0
"""Time limit of the process for its imports and for the environment's constructor."""
HELD_SECONDS = 5.0
"""CPU seconds for which one call may hold the lock of the interpreter. In this time no other session of the process moves. A
process that gets no processor shows no sign of life either, so wall time decides nothing."""
SILENT_SECONDS = 60.0
"""A process that shows no sign of life for so long is ended, even if it does not compute."""
HELD_AT_LIMIT_SECONDS = 0.5
"""CPU seconds without a sign of life, at the limit of the call that runs."""
LOOK_SECONDS = 0.25
END_SECONDS = 2.0
"""From the closed socket to SIGKILL."""
KILL_ROUNDS = 20
"""Looks at a process's session, since code may fork while it is killed."""
MOST_ABANDONED = 32


@dataclass(frozen=True, slots=True)
class HostedCode:
    """Code that a process loads."""

    loader: str
    """`module:function` that returns a `roundhouse.environments.operations.HostedOperations`."""
    argument: Any
    """Argument of the function, as JSON."""


Answer = Callable[..., Awaitable[Any]]
"""Answers a question of hosted code: gets its name and JSON values, returns JSON or raises the error that the code gets."""


@dataclass(slots=True)
class PendingCall:
    reply: asyncio.Future[Any]
    title: str
    """`<environment>: verify`, for messages."""
    failure: type[DataError] | None
    """Type for failures that the environment's code raises without one of our types. None: raise the original error."""
    place: str = ""
    """Line of code at which the call blocks its thread."""
    activity: str = ""
    """Token of the work that shows this line."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context of the rollout."""
    failed: InfraError | DataError | None = None
    """Failure of its process."""
    answer: Answer | None = None
    asks: list[asyncio.Task[None]] | None = None
    """Questions of the call's code; None: it asked none."""
    refusals: list[Exception] | None = None
    """Errors that were answers."""

    def fail(self, failure: InfraError | DataError) -> None:
        """Fail the call, unless it has ended."""
        if self.failed is None:
            self.failed = failure
            if not self.reply.done():
                self.reply.set_exception(failure)


class EnvironmentProcess(asyncio.Protocol):
    """One process, with the calls that wait for it. It belongs to the event loop that started it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = False
        self._loss: type[InfraError] = EnvironmentLost
        """Error of a session that outlives the process."""
        self.abandoned = 0
        """Calls that were cancelled while their code blocked a thread."""
        self.sessions = 0
        self.loop = asyncio.get_running_loop()
        self._calls: dict[int, PendingCall] = {}
        self._numbers = itertools.count(1)
        self._unread, self._unsent = bytearray(), bytearray()
        self._is_flush_due = False
        self._ready: asyncio.Future[Any] = self.loop.create_future()
        self._transport: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._silent_looks = 0
        self._cpu_at_sign = 0.0
        self._trace = _memory_file()
        with _memory_file() as shared:
            os.truncate(shared.fileno(), SHARED_BYTES)
            self._shared = memoryview(mmap.mmap(shared.fileno(), SHARED_BYTES)).cast("d")
            self._socket, theirs = socket.socketpair()
            with theirs:
                handed = [theirs.fileno(), shared.fileno(), self._trace.fileno()]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "roundhouse.environments.host", *map(str, handed)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=handed,
                    start_new_session=True,  # Ctrl-C is for the collector, which ends this process
                )

    async def load(self, code: HostedCode) -> None:
        """Wait until the process has its code.

        Raises:
            EnvironmentLost: the code cannot be loaded there.
        """
        self._calls[0] = PendingCall(self._ready, self.name, None)
        try:
            self._transport, _ = await self.loop.create_connection(lambda: self, sock=self._socket)
            self._transport.write(framed((sys.path, code.loader, code.argument)))
            self._watch = self.loop.create_task(self._look_again_and_again())
            async with asyncio.timeout(START_SECONDS):
                await self._ready
            del self._calls[0]  # the number of no call, for code that no call runs
        except BaseException as error:
            self.kill()
            if not isinstance(error, Exception):
                raise
            raise EnvironmentLost(
                f"The process of environment {self.name} did not start: {type(error).__name__}: {error}. Its own messages are "
                "in the output of this process."
            ) from error

    @property
    def is_usable(self) -> bool:
        """Return whether new sessions may start in this process."""
        return not self.ended and self.abandoned < MOST_ABANDONED

    async def call(
        self,
        session: int,
        operation: str,
        *arguments: Any,
        failure: type[DataError] | None,
        opening: Any = None,
        title: str = "",
        answer: Answer | None = None,
    ) -> Any:
        """Return the result of a call, as JSON.

        Args:
            failure: type of an error of the environment's code that is neither an InfraError nor a DataError.
            opening: row of a session that begins with this call and needs no code for it.
            title: of the call in messages.
            answer: answers the questions of an operation that asks.

        Raises:
            InfraError, DataError: raised by the environment's code; or the process was lost.
        """
        if self.ended:
            raise self._loss(f"{self.name}: the process of this session has ended.")
        number, title = next(self._numbers), title or f"{self.name}: {operation}"
        try:
            frame = framed_quickly((number, session, operation, *arguments))
            if opening is not None:
                frame = framed_quickly((0, session, OPEN, opening)) + frame
        except (TypeError, ValueError, RecursionError) as error:
            raise (failure or BadTaskRow)(
                f"{title} cannot be called, since its arguments are not JSON: {error}."
            ) from error
        pending = self._calls[number] = PendingCall(self.loop.create_future(), title, failure, answer=answer)
        self._send(frame)
        try:
            return await pending.reply
        except asyncio.CancelledError as error:
            self._give_up(number, pending, error)
            raise
        finally:
            self._calls.pop(number, None)
            for ask in pending.asks or ():
                ask.cancel()
            if pending.activity:
                ACTIVITY.end(pending.activity)

    def _send(self, frame: bytes) -> None:
        """Write a frame, together with the others of this turn of the loop."""
        self._unsent += frame
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._unsent and not self.ended:
            unsent, self._unsent = self._unsent, bytearray()
            self._transport.write(unsent)

    def drop(self, session: int) -> None:
        """Forget a session; sent with the next call."""
        self._unsent += framed_quickly((0, session, DROP))

    async def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        if self.ended:
            return
        self.ended = True
        self._transport.close()
        try:
            await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            log.info("%s: its process does not end by itself, and is killed", self.name)
        self.kill()
        if self._watch is not None:
            await asyncio.wait([self._watch])

    def kill(self) -> None:
        """End the process at once."""
        self.ended = True
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.abort()
        self._process.kill()
        _kill_session(self._process.pid)
        self._process.wait()
        self._trace.close()

    # Replies

    def data_received(self, data: bytes) -> None:
        self._unread += data
        try:
            messages = take_messages(self._unread)
        except ValueError:
            self._end_as_lost("wrote into a file descriptor that it did not open")
            return
        for message in messages:
            self._take(*message)

    def _take(self, number: int, kind: str, content: Any) -> None:
        pending = self._calls.get(number)
        if pending is None or pending.reply.done():  # it was cancelled, or code that it left behind asks
            if kind == "asks":
                self._send(framed((content[0], 0, ANSWER, failure_of(RuntimeError("the rollout has ended")), None)))
            return
        if kind in ("blocked", "stands"):
            self._show_place(pending, content)
            if kind == "blocked":
                log.info(
                    "%s blocks its thread at %s; other sessions continue in another thread", pending.title, content
                )
        elif kind == "returned":
            pending.reply.set_result(content)
        elif kind == "asks":
            ask = self.loop.create_task(self._answer(pending, *content), context=pending.context)
            pending.asks = [*(each for each in pending.asks or () if not each.done()), ask]
        else:
            pending.reply.set_exception(_error_of(Failure(*content), pending))

    def _show_place(self, pending: PendingCall, place: str) -> None:
        """Show the line at which a thread of the call blocks; empty if none blocks any more."""
        if pending.activity:
            ACTIVITY.end(pending.activity)
        pending.place, pending.activity = place, ""
        if place:
            pending.activity = pending.context.run(ACTIVITY.start, "environment", "code", where=place)

    async def _answer(self, pending: PendingCall, ask: int, name: str, arguments: list[Any]) -> None:
        assert pending.answer is not None, "the operation asks"
        failure, value = None, None
        try:
            value = await pending.answer(name, *arguments)
        except Exception as error:  # noqa: BLE001 - the code that asks gets it
            pending.refusals = [*(pending.refusals or ()), error]
            failure = failure_of(error)
        if not self.ended:
            self._send(framed((ask, 0, ANSWER, failure, value)))

    # Sign of life

    async def _look_again_and_again(self) -> None:
        counter = -1.0
        while True:
            # Looks are counted, not seconds: after both processes were stopped for a time, the other one gets its turn first
            if self._shared[0] != counter or not self._ready.done():
                counter, self._silent_looks, self._cpu_at_sign = self._shared[0], 0, self._cpu_seconds()
            else:
                self._silent_looks += 1
                if self._held_seconds() >= HELD_SECONDS or self._silent_looks * LOOK_SECONDS >= SILENT_SECONDS:
                    self._end_held()
                    return
            await asyncio.sleep(LOOK_SECONDS)

    def _cpu_seconds(self) -> float:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            return times.user + times.system
        return 0.0

    def _held_seconds(self) -> float:
        """CPU seconds of the process since its last sign of life."""
        return self._cpu_seconds() - self._cpu_at_sign if self._silent_looks else 0.0

    def _give_up(self, number: int, pending: PendingCall, cancellation: asyncio.CancelledError) -> None:
        """The attempt of a call has ended, mostly by a time limit: see `at_limit`."""
        if not self.ended and self._held_seconds() >= HELD_AT_LIMIT_SECONDS and (runner := self._runner()):
            if runner == number:
                self._end_held()
            else:
                pending.fail(EnvironmentRestarted(f"{pending.title} waited for another call that holds the process."))
        if pending.failed is not None:
            cancellation.args = (pending.failed,)
        elif pending.place:
            cancellation.args = (pending.place,)
            self.abandoned += 1
        if not self.ended:
            self._send(framed((number, 0, CANCEL)))

    def _end_held(self) -> None:
        culprit, place = self._runner(), self._held_place()
        self.kill()
        reason = f"held the interpreter's lock at {place}" if place else "held the interpreter's lock"
        log.warning("%s: a call %s; its process is replaced", self.name, reason)
        if (pending := self._calls.get(culprit)) is not None:
            pending.fail(
                EnvironmentBlocked(f"{pending.title} {reason}. Bound its work, or run it as a separate program.")
            )
            self._lose_all(EnvironmentRestarted, reason)
        else:  # code that a call left behind; each attempt counts, since it may be any session's
            self._lose_all(EnvironmentLost, reason)

    def connection_lost(self, _: Exception | None) -> None:
        if self.ended:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._end_as_lost(f"ended it with exit status {self._process.poll()}")

    def _end_as_lost(self, reason: str) -> None:
        """End the process, and fail the running call as the cause and all others as victims."""
        self.kill()
        if (pending := self._calls.get(self._runner())) is None:
            self._lose_all(EnvironmentLost, reason)
        else:
            pending.fail(EnvironmentLost(f"{pending.title} {reason}."))
            self._lose_all(EnvironmentRestarted, reason)

    def _lose_all(self, loss: type[InfraError], reason: str) -> None:
        """Fail all calls that have not failed yet, and the sessions that outlive this process."""
        self._loss = loss
        for pending in self._calls.values():
            pending.fail(loss(f"{pending.title} lost its process: a call {reason}."))

    def _runner(self) -> int:
        """Return the number of the running call that began last; 0 if no call runs."""
        return int(self._running_slot()[1])

    def _running_slot(self) -> tuple[float, float, float]:
        slots = self._shared[1:].tolist()
        running = [slots[at : at + SLOT] for at in range(0, len(slots), SLOT) if slots[at + 1]]
        thread, call, since = max(running, key=lambda slot: slot[2], default=(0.0, 0.0, 0.0))
        return thread, call, since

    def _held_place(self) -> str:
        """The line at which the running thread stands, by the stacks that the process's timer wrote."""
        self._trace.seek(0)
        text = self._trace.read(1 << 20).decode("utf-8", "replace")
        _, _, stack = text.partition(f"Thread 0x{int(self._running_slot()[0]):016x}")
        frames = _TRACED.findall(stack.partition("\n\n")[0])
        return place_of([(file, int(line), function) for file, line, function in frames])


_TRACED = re.compile(r'File "(.*)", line (\d+) in (\S+)')


def _kill_session(leader: int) -> None:
    """Kill the processes of a session: those that user code forked outlive the process that they came from."""
    for _ in range(KILL_ROUNDS):
        members = [process for process in psutil.process_iter() if _is_alive_in(process, leader)]
        for process in members:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not members:
            return
        psutil.wait_procs(members, timeout=0.1)


def _is_alive_in(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("environment"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _error_of(failure: Failure, pending: PendingCall) -> BaseException:
    """The error that the same code raises in this process; its name is its failure code."""
    kind, name, text, place = failure
    for refusal in pending.refusals or ():  # it passed through the code
        if (type(refusal).__name__, message_of(refusal)) == (name, text):
            return refusal
    if (error := typed_error(failure)) is not None:
        return error
    if kind == "moved":
        return EnvironmentLost(f"{pending.title} failed after its session had to change its event loop: {place}")
    if pending.failure is None:
        return RuntimeError(f"{pending.title} raised {place}")
    return pending.failure(f"{pending.title} raised {place}")


class EnvironmentProcesses:
    """Processes of one environment: the newest starts sessions, older ones finish theirs."""

    def __init__(self, code: HostedCode, name: str) -> None:
        self._code = code
        self._name = name
        self._newest: asyncio.Task[EnvironmentProcess] | None = None
        self._all: list[EnvironmentProcess] = []

    def begin(self) -> asyncio.Task[EnvironmentProcess]:
        """Start a process, unless the newest one can begin sessions."""
        task = self._newest
        if task is None or task.get_loop() is not asyncio.get_running_loop() or (task.done() and not _is_usable(task)):
            task = self._newest = asyncio.create_task(self._start())
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # raised when awaited
        return task

    async def _start(self) -> EnvironmentProcess:
        try:
            process = EnvironmentProcess(self._name)
        except OSError as error:
            raise EnvironmentLost(f"The process of environment {self._name} cannot be started: {error}.") from error
        with ACTIVITY.track("environment", "start of a process", where=self._name, patience=START_SECONDS):
            await process.load(self._code)
        self._all.append(process)
        return process

    async def process(self) -> EnvironmentProcess:
        """The process for a new session, which it counts.

        Raises:
            EnvironmentLost: no process can be started.
        """
        process = await asyncio.shield(self.begin())
        process.sessions += 1
        return process

    async def release(self, process: EnvironmentProcess) -> None:
        """A session has ended; a process that begins none ends with its last one."""
        process.sessions -= 1
        if not process.sessions and not process.is_usable and process in self._all:
            self._all.remove(process)
            await process.close()

    async def close(self) -> None:
        """End all processes."""
        if (newest := self._newest) is not None:
            newest.cancel()
            await asyncio.wait([newest])
        self._newest = None
        processes, self._all = self._all, []
        for process in processes:
            await process.close()


def _is_usable(start: asyncio.Task[EnvironmentProcess]) -> bool:
    return not start.cancelled() and start.exception() is None and start.result().is_usable
