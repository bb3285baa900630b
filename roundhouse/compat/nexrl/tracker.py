"""NexRL's activity tracker: its names for the activity of this process (`roundhouse.activity`) and for the errors of its own.

Invariant: work that was started and has not ended is in flight, here and in `roundhouse runs status` alike; a module is alive
when its `health_check` says so in time, and one without such a method is.

    tracker = ActivityTracker()
    tracker.register_module("loader", loader)
    with tracker.track("trainer", "batch 3"): …          an exception is reported, and raised
    tracker.wait_quiescent(60), tracker.check_module_liveness()
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roundhouse.activity import ACTIVITY, Activity
from roundhouse.compat.nexrl.resources import execute
from roundhouse.errors import ConfigError
from roundhouse.health.errors import KEPT_ERRORS, ErrorReporter, Severity

Post = Callable[[str, dict[str, Any]], None]
"""Takes a logging backend's name and what is posted to it."""


class _Tracking:
    """What tracker and proxy have in common."""

    if TYPE_CHECKING:
        start: Any
        end: Any
        report_exception: Any

    @contextmanager
    def track(self, module: str, work: str, auto_report_errors: bool = True) -> Iterator[str]:
        """The work of a block. An exception that leaves it is reported, unless `auto_report_errors` is false."""
        token = self.start(module, work)
        try:
            yield token
        except Exception as error:
            if auto_report_errors:
                self.report_exception(module, work, error)
            raise
        finally:
            self.end(token)


class ActivityTracker(_Tracking):
    """For a loop of your own, and for workers (`_activity_tracker`)."""

    def __init__(
        self, max_errors: int = KEPT_ERRORS, *, post: Post | None = None, activity: Activity = ACTIVITY
    ) -> None:
        """`post` carries out `experiment_logger_post`."""
        self._activity, self._post = activity, post
        self._errors = ErrorReporter(max_errors)
        self._modules: dict[str, Any] = {}
        self._workers: set[str] = set()
        self._step = 0

    def start(self, module: str, work: str) -> str:
        """Begin work; its token."""
        return self._activity.start(module, work)

    def end(self, token: str) -> None:
        self._activity.end(token)

    def is_quiescent(self) -> bool:
        return self._activity.is_quiescent()

    def wait_quiescent(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight; whether that came about."""
        return self._activity.wait_quiescent(threading.TIMEOUT_MAX if timeout is None else timeout)

    def is_rollout_worker_quiescent(self) -> bool:
        """Whether no registered rollout worker has work in flight."""
        return all(self._activity.is_quiescent(name) for name in self._workers)

    def get_running_status_summary(self) -> str:
        return self._activity.summary()

    def register_module(self, module_name: str, module_ref: Any, is_rollout_worker: bool = False) -> None:
        """A module, here or as an actor of `RayResourceManager`, whose `health_check` is asked."""
        self._modules[module_name] = module_ref
        if is_rollout_worker:
            self._workers.add(module_name)

    def check_module_liveness(self, timeout: float = 5.0) -> bool:
        """Whether every registered module is alive. One that does not answer in time is not."""
        alive: set[str] = set()

        def ask(name: str, check: Any) -> None:
            try:
                if execute(check):
                    alive.add(name)
            except Exception as error:  # noqa: BLE001 (the module's own code, or an actor that is gone)
                self.report_exception(name, "health_check", error)

        checks = {name: getattr(ref, "health_check", lambda: True) for name, ref in self._modules.items()}
        asking = [threading.Thread(target=ask, args=item, daemon=True) for item in checks.items()]
        for thread in asking:
            thread.start()
        until = time.monotonic() + timeout
        for thread in asking:
            thread.join(max(0.0, until - time.monotonic()))
        return alive == checks.keys()

    def report_exception(self, module: str, work: str, exception: Exception, severity: Severity | None = None) -> str:
        """Keep an error; its id."""
        return self._errors.report_exception(module, work, exception, severity or Severity.ERROR)

    def get_error_health_status(self) -> dict[str, Any]:
        """`status`, `message`, `recent_error_count`, `error_level_count` and `warning_level_count` of the last five minutes."""
        return self._errors.health().model_dump()

    def set_training_step(self, step: int) -> None:
        self._step = step

    def get_training_step(self) -> int:
        return self._step

    def experiment_logger_post(self, backend: str, **posted: Any) -> None:
        """Hand metrics or a message to a logging backend.

        Raises:
            ConfigError: nobody takes them, as in a worker of a run.
        """
        if self._post is None:
            raise ConfigError(
                f"experiment_logger_post({backend!r}) has no logger here. In a run, return numbers as metrics of the "
                "EvaluationRunResult, which go to tracking.sinks; in a loop of your own, make the tracker with post=…"
            )
        self._post(backend, posted)


class ActivityTrackerProxy(_Tracking):
    """A tracker that is elsewhere: every method of it, carried out there, if it is an actor of `RayResourceManager`."""

    def __init__(self, central_tracker: Any) -> None:
        self._central = central_tracker

    def __getattr__(self, name: str) -> Any:
        return functools.partial(execute, getattr(self._central, name))
