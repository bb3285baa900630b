"""Send a SIGTERM or SIGINT again if Python dropped its exception.

Prefect raises both as exceptions, anywhere in the main thread. In a few places Python cannot pass an exception to a
caller: in a finalizer, or in an `isinstance` that compiled code calls, as for each parameter of a Prefect flow. Python
then prints the exception and continues, and a cancelled run would train until its runner kills it half a minute later.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.exceptions import TerminationSignal

AGAIN_SECONDS = 0.1
"""Delay before the repetition, because the main thread is still in code that drops exceptions."""


@contextmanager
def redeliver_lost_signals() -> Iterator[None]:
    """In the block, a termination that `sys.unraisablehook` is given is sent to this process again."""
    before = sys.unraisablehook

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not None and issubclass(dropped.exc_type, (TerminationSignal, KeyboardInterrupt)):
            number = signal.SIGINT if issubclass(dropped.exc_type, KeyboardInterrupt) else signal.SIGTERM
            again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        else:
            before(dropped)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before
