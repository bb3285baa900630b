"""The inside of a process of user code: it runs the calls of many rollouts, and no blocked call keeps the others waiting.

`roundhouse.rollout.environment_process` starts this program, and decides when it has to end. The program reads calls from a
socket and writes one reply for each call, in the order in which the calls end.

    main thread     looks at the workers ten times a second, and shows by a counter in shared memory that it can run
    worker thread   an event loop; the newest worker that runs also reads the socket
    other threads   plain functions of calls that ask, marked in shared memory while their code runs

Invariant: a call waits for another rollout's code for half a second, unless that code holds the interpreter's lock. If a worker
does not answer for that long, another worker reads the socket and begins the calls that follow. A session stays with the worker
on which it began, since its state may belong to that event loop; it moves when that worker is blocked. An error of a session
that moved is an error of the move, and never an observation of the policy.

If code holds the interpreter's lock, no thread here can act. The shared memory then shows which call runs, and a timer of C
writes the stack of each thread into a file: the other process reads both, and ends this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import itertools
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roundhouse.die_with_parent import end_with_parent
from roundhouse.environments.base import ToolResult
from roundhouse.environments.host_messages import (
    ANSWER,
    CANCEL,
    DROP,
    MOST_THREADS,
    MOST_WORKERS,
    OPEN,
    SHARED_BYTES,
    SLOT,
    Failure,
    Refused,
    failure_of,
    framed,
    framed_quickly,
    framed_reply,
    place_of,
    read_message,
    take_messages,
    typed_error,
)
from roundhouse.environments.operations import HostedOperations, HostedSession
from roundhouse.imports import load_function
from roundhouse.user_code import thread_mark

LOOK_SECONDS = 0.1
STALL_LOOKS = 5
"""A worker that does not answer for so many looks is blocked. Each blocked worker that computes makes this time longer by as
much before another worker takes over: they share one processor, and code that is merely slow should end in turn. Looks are
counted, not seconds: on a busy machine the thread that looks gets as little time as the worker."""
BUSY = 0.05
"""Share of a processor."""
TRACE_SECONDS = 0.7
"""After so long without a sign of life, the timer writes the stacks."""
READ_BYTES = 1 << 18


class Abandoned(BaseException):
    """Raised in a blocked call after its rollout has ended. User code with `except Exception` does not catch it."""


@dataclass(slots=True)
class HostSession(HostedSession):
    """The session, with the worker to which it belongs."""

    worker: Worker | None = None
    used: bool = False
    """Code has run for it, so that its state may belong to the worker's event loop."""
    moved: bool = False


@dataclass(slots=True)
class Call:
    """A call in flight. Its worker changes only before it has begun."""

    number: int
    session: HostSession
    operation: str
    arguments: tuple[Any, ...]
    worker: Worker
    begun: bool = False
    task: asyncio.Task[Any] | None = None
    threads: CallThreads | None = None


@dataclass(slots=True)
class MarkedThread:
    """A thread while it runs code of a call."""

    ident: int
    slot: int | None
    """Place in shared memory; None if all are taken."""
    looks: int = 0
    """Looks at it since the code began to run."""


class ThreadSlots:
    """Places in shared memory for threads that are not workers."""

    def __init__(self, shared: memoryview[float]) -> None:
        self.shared = shared
        self.gate = threading.Lock()
        """Held while a thread is marked, unmarked, or interrupted."""
        self.free = [1 + SLOT * (MOST_WORKERS + number) for number in range(MOST_THREADS)]


class CallThreads:
    """The threads of one call (`roundhouse.user_code.ThreadMark`)."""

    def __init__(self, call: int, slots: ThreadSlots) -> None:
        self._call = call
        self._slots = slots
        self._marked: dict[int, MarkedThread] = {}
        self.reported = 0
        """Thread whose place was reported."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._mark()
        try:
            yield
        finally:
            try:
                self._unmark()
            except Abandoned:  # raised here, since the code had just ended
                self._unmark()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._unmark()
        try:
            yield
        finally:
            self._mark()

    def _mark(self) -> None:
        ident, slots = threading.get_ident(), self._slots
        with slots.gate:
            slot = slots.free.pop() if slots.free else None
            self._marked[ident] = MarkedThread(ident, slot)
            if slot is not None:
                slots.shared[slot] = float(ident)
                slots.shared[slot + 2] = time.monotonic()
                slots.shared[slot + 1] = self._call

    def _unmark(self) -> None:
        slots = self._slots
        with slots.gate:
            thread = self._marked.pop(threading.get_ident(), None)
            if thread is not None and thread.slot is not None:
                slots.shared[thread.slot + 1] = 0
                slots.free.append(thread.slot)

    def interrupt(self) -> None:
        """End the code of the call in all its threads, when they next run Python code."""
        with self._slots.gate:
            for ident in self._marked:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Abandoned))

    def look(self) -> tuple[int, str] | None:
        """Return call and place, if a thread begins to block; call and "", if the reported thread does not run any more."""
        with self._slots.gate:
            marked = list(self._marked.values())
            for thread in marked:
                thread.looks += 1
            blocked = next((thread.ident for thread in marked if thread.looks > STALL_LOOKS), 0)
        if blocked == self.reported:
            return None
        self.reported = blocked
        return self._call, thread_place(blocked) if blocked else ""


Reply = Callable[["Worker", Call, Any, BaseException | None], None]


class Marked(Coroutine[Any, Any, None]):
    """The coroutine of a call: marks its worker while its code runs, and does nothing if another worker has taken the call.

    The reply is sent by the last step itself: a callback of the event loop would come after the next call, which may block.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], worker: Worker, call: Call, reply: Reply) -> None:
        self._work = work
        self._worker = worker
        self._call = call
        self._reply = reply

    def send(self, value: Any) -> Any:
        return self._run(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._work.throw, *error)

    def _run(self, step: Callable[..., Any], *value: Any) -> Any:
        if not self._worker.enter(self._call):
            self._work.close()
            raise StopIteration
        result: Any = None
        failure: BaseException | None = None
        try:
            return step(*value)
        except StopIteration as end:
            result = end.value
        except BaseException as error:  # noqa: BLE001 - the other process raises it
            failure = error
        finally:
            self._worker.leave()
        self._reply(self._worker, self._call, result, failure)
        raise StopIteration

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise NotImplementedError("an event loop runs it as a task")


class Worker:
    """An event loop in a separate thread."""

    def __init__(self, shared: memoryview[float], number: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.running = 0
        """Number of the call that the thread executes; 0 between two calls."""
        self.abandoned = False
        """An interruption may be on its way: no other call begins here."""
        self.reported = 0
        self.silent_looks = 0
        self._is_asked = False
        self._cpu = self._looked_at = 0.0
        self.is_busy = False
        """Between the last two looks, its thread used a processor."""
        self.gate = threading.Lock()
        """Held while a call begins, ends, is interrupted or changes its worker."""
        self._shared = shared
        self._slot = 1 + SLOT * number
        self.thread = threading.Thread(target=self._run, name=f"environment-{number}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self._shared[self._slot] = float(threading.get_ident())
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
            except BaseException:  # noqa: BLE001 - `Abandoned`, or the exit that a call asked for and replies with
                continue

    def enter(self, call: Call) -> bool:
        """Mark that code of a call runs now; False: another worker has taken the call."""
        with self.gate:
            if call.worker is not self:
                return False
            call.begun = call.session.used = True
            self.running = call.number
            self._shared[self._slot + 2] = time.monotonic()
            self._shared[self._slot + 1] = call.number
            return True

    def leave(self) -> None:
        with self.gate:
            self.running = 0
            self._shared[self._slot + 1] = 0

    def look(self, now: float) -> None:
        """Ask for a sign of life, unless an earlier question is open, and see whether the thread computes."""
        if not self._is_asked:
            self._is_asked, self.silent_looks = True, 0
            self.loop.call_soon_threadsafe(self._answer)
        elif self.thread.ident is not None:
            self.silent_looks += 1
            cpu = time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))
            self.is_busy = cpu - self._cpu > BUSY * (now - self._looked_at)
            self._cpu = cpu
        self._looked_at = now

    def _answer(self) -> None:
        self._is_asked, self.silent_looks = False, 0

    @property
    def is_blocked(self) -> bool:
        return self.is_silent_for(STALL_LOOKS)

    def is_silent_for(self, looks: int) -> bool:
        return self.abandoned or self.silent_looks >= looks

    def interrupt(self, call: int) -> None:
        """End the code of this call, when it next runs Python code."""
        with self.gate:
            if self.running == call and self.thread.ident is not None:
                self.abandoned = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread.ident), ctypes.py_object(Abandoned)
                )


def thread_place(ident: int) -> str:
    """Return the line of code at which a thread stands."""
    frame = sys._current_frames().get(ident)
    frames = traceback.extract_stack(frame) if frame is not None else []
    return place_of([(each.filename, each.lineno or 0, each.name) for each in reversed(frames)])


@dataclass(slots=True)
class Host:
    """Calls in flight, sessions and workers of this process."""

    socket: socket.socket
    service: HostedOperations
    shared: memoryview[float]
    trace: int
    """Descriptor of the file of stacks."""
    ended: threading.Event = field(default_factory=threading.Event)
    sessions: dict[int, HostSession] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    current: Worker | None = None
    asked: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = field(default_factory=dict)
    """Open questions of calls, by number."""
    _asks: Iterator[int] = field(default_factory=itertools.count)
    _slots: ThreadSlots = field(init=False)
    _unread: bytearray = field(default_factory=bytearray)
    _reading: threading.Lock = field(default_factory=threading.Lock)
    """Held by the worker that reads, and while another takes over."""
    _unsent: bytearray = field(default_factory=bytearray)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._slots = ThreadSlots(self.shared)

    def serve(self) -> None:
        """Look after the workers until the socket is closed."""
        self._show_life()
        self._take_over()
        self.send((0, "returned", None))
        while not self.ended.wait(LOOK_SECONDS):
            self._show_life()
            self._flush()
            now = time.monotonic()
            for worker in self.workers:
                worker.look(now)
                if worker.is_blocked and worker.running and worker.reported != worker.running:
                    worker.reported = worker.running
                    self.send((worker.running, "blocked", thread_place(worker.thread.ident or 0)))
            for call in list(self.calls.values()):
                if call.threads is not None and (seen := call.threads.look()) is not None:
                    self.send((seen[0], "stands", seen[1]))
            computing = sum(each.is_busy and each.is_blocked for each in self.workers if each is not self.current)
            if self.current is not None and self.current.is_silent_for(STALL_LOOKS * (1 + computing)):
                self._take_over()

    def _show_life(self) -> None:
        self.shared[0] += 1
        if os.fstat(self.trace).st_size:
            os.ftruncate(self.trace, 0)
        faulthandler.dump_traceback_later(TRACE_SECONDS, file=self.trace)

    def _take_over(self) -> None:
        """Let a worker that runs read the socket, and begin the calls that wait for a blocked one."""
        free = next((each for each in self.workers if not each.is_blocked), None)
        if free is None:
            if len(self.workers) == MOST_WORKERS:
                return
            free = Worker(self.shared, len(self.workers))
            self.workers.append(free)
        with self._reading:
            self.current = free
        free.loop.call_soon_threadsafe(free.loop.add_reader, self.socket, self._read, free)
        for call in list(self.calls.values()):
            blocked, session = call.worker, call.session
            with blocked.gate:
                if call.begun or not blocked.is_blocked:
                    continue
                call.worker = session.worker = free
            session.moved |= session.used
            free.loop.call_soon_threadsafe(self._start, free, call)

    def _read(self, worker: Worker) -> None:
        with self._reading:
            if worker is not self.current:
                worker.loop.remove_reader(self.socket)
                return
            try:
                data = self.socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                worker.loop.remove_reader(self.socket)
                self.ended.set()
                return
            self._unread += data
            messages = take_messages(self._unread)
        for message in messages:
            self._begin(worker, *message)

    def _begin(self, reader: Worker, number: int, session_id: int, operation: str, *arguments: Any) -> None:
        if operation == CANCEL:
            self._cancel(number)
        elif operation == OPEN:
            self.sessions[session_id] = HostSession(row=arguments[0], worker=reader)
        elif operation == DROP:
            self.sessions.pop(session_id, None)
        elif operation == ANSWER:
            self._answer(number, *arguments)
        else:
            if (session := self.sessions.get(session_id)) is None:
                session = self.sessions[session_id] = HostSession(worker=reader)
            if session.worker is None or session.worker.is_blocked:
                session.worker, session.moved = reader, session.used
            call = self.calls[number] = Call(number, session, operation, arguments, session.worker)
            if session.worker is reader:
                self._start(reader, call)
            else:
                session.worker.loop.call_soon_threadsafe(self._start, session.worker, call)

    def _cancel(self, number: int) -> None:
        if (call := self.calls.get(number)) is not None:
            worker = call.worker
            worker.loop.call_soon_threadsafe(lambda: call.task is not None and call.task.cancel())
            if worker.is_blocked:
                worker.interrupt(number)
            if call.threads is not None:
                call.threads.interrupt()

    def _answer(self, ask: int, failure: list[str] | None, value: Any) -> None:
        if (open_question := self.asked.pop(ask, None)) is None:
            return  # its call was cancelled
        loop, future = open_question

        def settle() -> None:
            if future.done():
                return
            if failure is None:
                future.set_result(value)
            else:
                cause = Failure(*failure)
                future.set_exception(typed_error(cause) or Refused(cause))

        loop.call_soon_threadsafe(settle)

    async def _ask(self, call: Call, name: str, *arguments: Any) -> Any:
        """Ask the other process on behalf of a call (`operations.Ask`)."""
        ask, loop = next(self._asks), asyncio.get_running_loop()
        future = loop.create_future()
        frame = framed_quickly((call.number, "asks", (ask, name, arguments)))
        self.asked[ask] = loop, future
        self._write(frame)
        try:
            return await future
        finally:
            self.asked.pop(ask, None)

    def _start(self, worker: Worker, call: Call) -> None:
        if call.worker is worker:
            call.task = worker.loop.create_task(Marked(self._carry_out(call), worker, call, self._reply))

    async def _carry_out(self, call: Call) -> Any:
        operation = self.service.operations[call.operation]
        if call.operation in self.service.asking:
            call.threads = CallThreads(call.number, self._slots)
            thread_mark.set(call.threads)
            return await operation(partial(self._ask, call), call.session, *call.arguments)
        value = await operation(call.session, *call.arguments)
        if call.session.moved and isinstance(value, ToolResult) and value.status >= 500:
            raise RuntimeError(value.text)
        return value

    def _reply(self, worker: Worker, call: Call, value: Any, error: BaseException | None) -> None:
        del self.calls[call.number]
        try:
            if error is None:
                frame = framed_reply(call.number, self.service.written(call.operation, value))
        except Exception as unwritten:  # noqa: BLE001 - the value is not JSON, too long, or its own code raises
            error = unwritten
        if error is not None:
            row = call.session.row if call.operation in self.service.of_row else None
            frame = framed((call.number, "failed", failure_of(error, call.session.moved, row)))
        with self._writing:
            is_first = not self._unsent
            self._unsent += frame
        if is_first:  # one write for the replies of one turn of the loop; if the next call blocks, `serve` writes them
            worker.loop.call_soon(self._flush)

    def send(self, message: tuple[Any, ...]) -> None:
        """Write a message at once, after all earlier ones."""
        self._write(framed(message))

    def _write(self, frame: bytes) -> None:
        with self._writing:
            self._unsent += frame
        self._flush()

    def _flush(self) -> None:
        """Write unsent data, unless the peer has gone."""
        with self._writing:
            unsent, self._unsent = self._unsent, bytearray()
            try:
                if unsent:
                    self.socket.sendall(unsent)
            except OSError:
                self.ended.set()


def main() -> None:
    """Load the code that the first message names, then answer calls: `host <socket> <shared> <trace>`."""
    end_with_parent(signal.SIGKILL)
    channel, shared, trace = (int(argument) for argument in sys.argv[1:4])
    connection = socket.socket(fileno=channel)
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    if not size:
        return  # the other side has gone
    sys.path[:], loader, argument = read_message(connection.recv(size, socket.MSG_WAITALL))
    memory = memoryview(mmap.mmap(shared, SHARED_BYTES)).cast("d")
    host = Host(connection, HostedOperations({}), memory, trace)
    try:
        host.service = load_function(loader, "the loader of a service")(argument)
    except Exception as error:  # noqa: BLE001 - the other process reports it
        host.send((0, "failed", failure_of(error)))
        return
    host.serve()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
