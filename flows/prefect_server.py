"""Prefect's own command, for its server: `python -m flows.prefect_server server start …`. Garbage is collected elsewhere.

Invariant: the thread of the server's event loop never waits for a lock of the database.

The server has its SQLite connections in threads, and a connection whose thread waits for the write lock (a minute at most) is
locked itself. What of it is garbage, an old cursor say, waits for that when it is collected. Python collects garbage in
whichever thread happens to allocate, mostly that of the event loop; and where the write lock belongs to a request which the
event loop would go on with, nobody gets any further until the minute is over. About a third of the cancelled runs met this:
the event loop's thread stood in an allocation, a request for a flow run's state held the lock, and three connections waited.
"""

from __future__ import annotations

import gc
import sys
import threading
import time

LOOK_SECONDS = 0.5


def collect_garbage_elsewhere() -> None:
    """Have one thread collect all garbage of this process: nobody else waits for what it waits for."""
    gc.disable()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        full = [count > limit for count, limit in zip(gc.get_count(), gc.get_threshold(), strict=True)]
        if any(full):
            gc.collect(max(generation for generation, is_full in enumerate(full) if is_full))


def main() -> None:
    collect_garbage_elsewhere()
    from prefect.cli import app

    sys.argv[0] = "prefect"
    app()


if __name__ == "__main__":
    main()
