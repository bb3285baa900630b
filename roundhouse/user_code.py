"""Errors of user code, with the place and the row that they are about, and a limit for code in this process.

verify raised KeyError('anser') at env.py, line 26: `return Verdict(float(row["anser"]))`. The row has: task_id, answer.
"""

from __future__ import annotations

import faulthandler
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

_OURS = str(Path(__file__).parent)
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def describe_error(error: BaseException, row: Mapping[str, Any] | None = None) -> str:
    """Return an error with the file, line and source line of the innermost frame of user code, and the fields of a row.

    Args:
        row: the task row that the code was called with.
    """
    parts = [shown(error)]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if own:
        parts[0] += f" at {own[-1].filename}, line {own[-1].lineno}"
        parts[0] += f": `{own[-1].line}`" if own[-1].line else ""
    if row is not None and own:
        parts.append(f"The row has: {', '.join(map(str, row))}")
    return ". ".join(parts)


def message_of(error: BaseException) -> str:
    """Return `str(error)`, also if the error's own code cannot make it; a long text is cut."""
    return _text_by(str, error)


def shown(error: BaseException) -> str:
    """Return `repr(error)`, under the same terms as `message_of`."""
    return _text_by(repr, error)


LONGEST_TEXT = 10_000
"""Characters of an error's text that are kept: it is logged, stored, and shown to the policy."""


def _text_by(show: Callable[[object], str], error: BaseException) -> str:
    try:
        text = show(error)
        return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text)} characters)"
    except Exception as own:  # noqa: BLE001 - the error is the user's code, too
        return f"{type(error).__name__} (to show it raises {type(own).__name__})"


class ThreadMark(Protocol):
    """Shows the watching process which threads run code of a call."""

    def running(self) -> AbstractContextManager[None]:
        """Mark the current thread for the block."""

    def waiting(self) -> AbstractContextManager[None]:
        """Take the mark off for the block, in which the thread waits for an answer."""


thread_mark: ContextVar[ThreadMark | None] = ContextVar("thread_mark", default=None)
"""Of the call to which the current code belongs; None in a process that is not watched."""


def running_here() -> AbstractContextManager[None]:
    """Mark the current thread for the block, in which it runs code of the current call."""
    mark = thread_mark.get()
    return nullcontext() if mark is None else mark.running()


def waiting_here() -> AbstractContextManager[None]:
    """Take the mark of `running_here` off for the block."""
    mark = thread_mark.get()
    return nullcontext() if mark is None else mark.waiting()


LOCK_SECONDS = 300.0
_SIGN_SECONDS = 1.0


@contextmanager
def lock_limit(seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """End this process if code of the block holds the interpreter lock for so many seconds of CPU.

    No thread, handler or time limit of Python can act while, for example, a regular expression backtracks. The kernel
    sends SIGPROF, a C handler writes the stacks of all threads to stderr, and the signal ends the process. Code that
    blocks without the lock has the limit of its stage.
    """
    is_over = threading.Event()

    def show_life() -> None:
        while not is_over.is_set():
            signal.setitimer(signal.ITIMER_PROF, seconds)
            is_over.wait(_SIGN_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, 0)  # an outer block sets its own timer within a second

    faulthandler.register(signal.SIGPROF, file=2, all_threads=True, chain=True)
    watch = threading.Thread(target=show_life, name="lock-limit", daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


def _is_library(file: str) -> bool:
    return file.startswith((_OURS, "<frozen")) or any(library in file for library in _LIBRARIES)
