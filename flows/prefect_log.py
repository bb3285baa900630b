"""How far a run is, in Prefect's log of its flow run, as the terminal shows it.

Invariant: at most one line in `PLAIN_INTERVAL_SECONDS` says what goes on now; what stays true (iterations, evaluations, alerts,
warnings) has a line each. A process that was told to end is no crash, and its log does not call it one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from rich.console import Console
from rich.text import Text

from roundhouse.console import RunView
from roundhouse.progress import logger as progress

CRASH = "Crash detected!"
SIGNALS = ("termination signal", "interrupt signal")
ENDED = "Told to end (Cancel, Ctrl-C, or the machine's end). Complete stages are kept; Retry goes on after them."


class PrefectLog(RunView):
    """The events of a run as lines of the flow run that this is made in; threads of its process may write too."""

    def __init__(self, iterations: int | None) -> None:
        super().__init__(Console(quiet=True, force_terminal=False), iterations)
        self._run_logger = get_run_logger()

    def say(self, text: str) -> None:
        for line in Text.from_markup(text).plain.splitlines():
            if line.strip():
                self._run_logger.info(line.strip())

    def _on_collect(self, iteration: int, finished: int, planned: int) -> None:
        self._count(f"iteration {iteration}: rollouts", finished, planned)

    def _on_evaluate(self, version: int, finished: int, planned: int) -> None:
        self._count(f"evaluating version {version}", finished, planned)

    def _on_warm_start(self, step: int, steps: int, loss: float) -> None:
        self._count("making the starting policy", step, steps, f"loss {loss:.3f}")

    def _count(self, what: str, done: int, total: int, note: str = "") -> None:
        """The last count has a line in any case."""
        if done == total:
            self.say(f"{what} {done}/{total} {note}")
        else:
            self.activity(what, done, total, note)


class _Warnings(logging.Handler):
    """Roundhouse's own warnings, in the same log."""

    def __init__(self, log: PrefectLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log._run_logger.log(record.levelno, record.getMessage())


def _calls_an_end_an_end(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    if said.startswith(CRASH) and any(signal in said for signal in SIGNALS):
        record.msg, record.args = ENDED, ()
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


@contextmanager
def reports_to_prefect(iterations: int | None = None) -> Iterator[None]:
    """For the block. Outside of flow runs nothing; within another such block, that one learns how many iterations there are."""
    if FlowRunContext.get() is None:
        yield
        return
    for handler in progress.handlers:
        if isinstance(handler, PrefectLog):
            handler.iterations = iterations
            yield
            return
    log = PrefectLog(iterations)
    package, warnings = logging.getLogger("roundhouse"), _Warnings(log)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_calls_an_end_an_end)  # for good: the flow ends after the block
    with ExitStack() as stack:
        progress.addHandler(log)
        stack.callback(progress.removeHandler, log)
        package.addHandler(warnings)
        stack.callback(package.removeHandler, warnings)
        yield
