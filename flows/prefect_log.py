"""Progress of a run in Prefect's log of its flow run, as in the terminal.

Invariant: current activity takes at most one line in `PLAIN_INTERVAL_SECONDS`; each lasting fact (stages with their
figures, iterations, evaluations, alerts, warnings) has a line. A process that was asked to end is not logged as a
crash.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from rich.console import Console
from rich.text import Text

from roundhouse.activity import logger as progress
from roundhouse.console import RunView
from roundhouse.errors import RoundhouseError
from roundhouse.store.stage import Reference, read_manifest

CRASH = "Crash detected!"
SIGNALS = ("termination signal", "interrupt signal")
ENDED = "Stopped (Cancel, Ctrl-C or shutdown). Complete stages are kept; Retry continues after them."
FIGURES: dict[str, dict[str, str]] = {
    "refit": {"refit/replica_seconds_max": "slowest replica {:.1f} s"},
    "collect": {
        "reward/mean": "reward {:.3f}",
        "rollout/failed_rate": "failed {:.1%}",
        "rollout/truncated_rate": "truncated {:.1%}",
        "rollout/generated_tokens": "{:,.0f} tokens",
    },
    "validate": {
        "validate/sequences": "{:,.0f} sequences",
        "validate/quarantined": "{:,.0f} quarantined",
        "validate/trained_tokens": "{:,.0f} tokens to train on",
    },
    "train": {
        "train/loss": "loss {:.4g}",
        "train/grad_norm": "gradient norm {:.3g}",
        "train/entropy": "entropy {:.3g}",
        "train/gen_kl_error": "KL to the engine {:.2g}",
    },
    "checkpoint": {},
}
"""Metrics in each stage's line, with their formats. An evaluation has a separate line."""


class PrefectLog(RunView):
    """The events of a run as lines of the flow run that this is made in; threads of its process may write too."""

    def __init__(self, iterations: int | None) -> None:
        super().__init__(Console(quiet=True, force_terminal=False), iterations)
        self._run_logger = get_run_logger()

    def _write(self, text: str) -> None:
        for line in Text.from_markup(text).plain.splitlines():
            if line.strip():
                self._run_logger.info(line.strip())

    def _on_collect(self, iteration: int, finished: int, planned: int) -> None:
        self._count(f"iteration {iteration}: rollouts", finished, planned)

    def _on_evaluate(self, version: int, finished: int, planned: int) -> None:
        self._count(f"evaluating version {version}", finished, planned)

    def _on_warm_start(self, step: int, steps: int, loss: float) -> None:
        self._count("making the starting policy", step, steps, f"loss {loss:.3f}")

    def _on_stage_done(self, name: str, about: str, result: Any, begun: float) -> None:
        """Log a finished stage. A stage that was already complete is marked so; an unreadable manifest is left to its
        readers."""
        if name not in FIGURES or not isinstance(result, Reference):
            return
        with suppress(RoundhouseError, OSError):
            manifest = read_manifest(result)
            if manifest.finished_at < begun:
                self.say(f"{about}: {name} was complete already")
                return
            figures = [
                form.format(manifest.metrics[metric])
                for metric, form in FIGURES[name].items()
                if metric in manifest.metrics
            ]
            self.say(" · ".join([f"{about}: {name} {manifest.finished_at - manifest.started_at:.1f} s", *figures]))

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
    message = record.getMessage()
    if message.startswith(CRASH) and any(signal in message for signal in SIGNALS):
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
