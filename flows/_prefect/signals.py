"""Who was told to end, ends: SIGTERM and SIGINT that Python drops are sent again.

Both are exceptions, raised wherever the main thread happens to be. In a few places Python has nobody to hand an exception to:
in a finalizer, or in an `isinstance` that compiled code asks for, as it does for all that Prefect takes as a parameter. There
it prints the exception and goes on, and a cancelled run would train until its runner kills it half a minute later.
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
"""Not at once: the main thread is still where exceptions are dropped."""


@contextmanager
def redeliver_lost_signals() -> Iterator[None]:
    """For the block."""
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
