"""A time limit for the rendering of a chat template.

Invariants: an event loop that waits for a rendering answers other requests in the meantime. A rendering that exceeds
the limit is ended, so it uses no more CPU and does not delay an exit.

A template is a program, and Python can end a thread from outside only by an exception at its next instruction. Each
rendering has a separate thread, so the exception cannot hit other work.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from roundhouse.generation.protocol import BadRequest

T = TypeVar("T")

RENDER_SECONDS = 10.0
"""A conversation of 100,000 tokens renders in less than one."""


class RenderingTooSlow(BadRequest):
    """The chat template did not end within the time limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The chat template did not render these messages within {seconds:g} s. Shorten them.", "messages"
        )


class _Ended(BaseException):
    """Raised in the thread of a rendering that exceeds its limit."""


class _Rendering(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="rendering", daemon=True)
        self.future: Future[T] = Future()
        self._work = work

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - the waiting caller raises it
            self.future.set_exception(error)

    def end(self) -> None:
        if self.ident is not None and not self.future.done():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_Ended))


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, which renders.

    Raises:
        RenderingTooSlow: it takes longer.
    """
    rendering = _Rendering(work)
    rendering.start()
    try:
        return rendering.future.result(seconds)
    except TimeoutError:
        raise RenderingTooSlow(seconds) from None
    finally:
        rendering.end()


async def awaited_within(seconds: float, work: Callable[[], T]) -> T:
    """Render as `within` does, without blocking the event loop."""
    rendering = _Rendering(work)
    rendering.start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(rendering.future), seconds)
    except TimeoutError:
        raise RenderingTooSlow(seconds) from None
    finally:
        rendering.end()
