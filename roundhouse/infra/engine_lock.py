"""Whose turn it is with the engine of a directory's services: one process's at a time.

Invariant: there is one engine, which answers with one run's weights. Who comes while another live process has it waits,
and is told for whom; a process that is gone, by whatever end, has nothing any more.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from roundhouse.infra.state import EngineUse, ServiceHolder, StateDirectory
from roundhouse.progress import announce

LOOK_SECONDS = 0.5

logger = logging.getLogger(__name__)


@contextmanager
def engine_lock(state: StateDirectory, run_id: str) -> Iterator[None]:
    """Have the engine for the block, from when nobody else has it. Within the block this process may have it again."""
    mine = EngineUse(run_id, ServiceHolder.this_process())
    if _had_already(state, mine):
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError), state.lock():  # a directory that is gone has no engine
            state.write_engine_use(None)


def _had_already(state: StateDirectory, mine: EngineUse) -> bool:
    """Wait for the turn and take it, unless this process has it."""
    told = None
    while True:
        with state.lock():
            use = state.engine_use()
            if use is not None and use.holder == mine.holder:
                return True
            if use is None or not use.holder.alive():
                state.write_engine_use(mine)
                return False
        if use != told:
            told = use
            text = (
                f"run {use.run_id} (process {use.holder.pid}) has the engine of the services in {state.path}, and run "
                f"{mine.run_id} comes next. For both at once, give one of them services of its own (infra.state)."
            )
            announce("waiting", text=text)
            logger.info("Waiting: %s", text)
        time.sleep(LOOK_SECONDS)
