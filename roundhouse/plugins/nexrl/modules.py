"""The base of NexRL's components, its configuration of one, and its trackers of activity and errors, by NexRL's names.

Invariant: work that was started and has not ended is in flight, here and in `roundhouse runs status` alike; a module is alive
if its `health_check` returns true in time, and one without such a method is.

    tracker = ActivityTracker(config)
    tracker.register_module("loader", loader)
    with tracker.track("trainer", "batch 3"): …          an exception is reported, and raised
    tracker.wait_quiescent(60), tracker.check_module_liveness()
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roundhouse.activity import ACTIVITY, Activity
from roundhouse.errors import ConfigError
from roundhouse.health import errors
from roundhouse.health.errors import KEPT_ERRORS, ErrorInfo
from roundhouse.health.errors import Severity as ErrorSeverity

__all__ = ["ActivityTracker", "ActivityTrackerProxy", "ErrorInfo", "ErrorReporter", "ErrorSeverity", "NexRLModule"]

log = logging.getLogger(__name__)
Post = Callable[[str, dict[str, Any]], None]
"""Takes a logging backend's name and the keyword arguments of a post."""


def read_section(config: Mapping[str, Any], known: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the values of a component's configuration, with the defaults in `known`.

    Raises:
        ConfigError: names every key that the component does not have.
    """
    if unknown := [str(key) for key in config if key not in known and key != "type"]:
        raise ConfigError(f"{owner} has no {', '.join(unknown)}. Its keys: {', '.join(known)}. Remove the others.")
    return {**known, **{str(key): value for key, value in config.items() if key != "type" and value is not None}}


class NexRLModule:
    """A component with a name and an activity tracker."""

    _module_name: str = "invalid"
    _activity_tracker: Any = None

    def set_activity_tracker(self, tracker: Any) -> None:
        """Report the work of this module to `tracker`."""
        self._activity_tracker = tracker

    def set_module_name(self, module_name: str) -> None:
        self._module_name = module_name

    def get_module_name(self) -> str:
        return self._module_name

    def health_check(self) -> bool:
        """Return true: a module that answers is alive. Override it for a closer look."""
        return True

    def easy_dump(
        self, value: Any, keys: list[str] | None = None, value_formatter: Callable[[Any], str] | None = None
    ) -> None:
        """Log a value, or these keys of it, with the name of the module, at the level DEBUG."""
        chosen = value if keys is None else {key: value[key] for key in keys}
        log.debug("%s: %s", self._module_name, (value_formatter or repr)(chosen))


class ErrorReporter(errors.ErrorReporter):
    """Keeps the newest errors; `roundhouse.health.errors` has the rest."""

    def __init__(self, max_errors: int = KEPT_ERRORS) -> None:
        super().__init__(max_errors)

    def get_health_status(self) -> dict[str, Any]:
        """Return `status`, `message` and the counts of the last five minutes."""
        return self.health().model_dump()


class ExperimentLogger:
    """Posts of one experiment."""

    def __init__(self, project_name: str, experiment_name: str, post: Post | None) -> None:
        self.project_name, self.experiment_name, self._post = project_name, experiment_name, post
        self._has_warned = False

    def post(self, backend: str, **posted: Any) -> None:
        """Hand metrics or a message to a logging backend; without `post`, to Python's logging."""
        if self._post is not None:
            self._post(backend, posted)
            return
        if not self._has_warned:
            self._has_warned = True
            log.warning("Posts to %s are logged alone: make the ActivityTracker with post=… to send them.", backend)
        log.info("%s: %s", backend, posted)


class _Tracking:
    """The methods that tracker and proxy share."""

    if TYPE_CHECKING:
        start: Any
        end: Any
        report_exception: Any

    @contextmanager
    def track(self, module: str, work: str, auto_report_errors: bool = True) -> Iterator[str]:
        """Track the work of a block. An exception that leaves it is reported, unless `auto_report_errors` is false."""
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
        self,
        config: Mapping[str, Any] | None = None,
        max_errors: int = KEPT_ERRORS,
        *,
        post: Post | None = None,
        activity: Activity = ACTIVITY,
    ) -> None:
        """
        Args:
            config: NexRL's configuration, of which `project_name` and `experiment_name` are read.
            post: carries out `experiment_logger_post`; without it posts are logged.

        Raises:
            ConfigError: `config` is not a mapping.
        """
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"ActivityTracker: config is {config!r}, which is not a mapping. Give NexRL's configuration, and the number of "
                "errors as max_errors."
            )
        names = config or {}
        self.experiment_logger = ExperimentLogger(
            str(names.get("project_name", "")), str(names.get("experiment_name", "")), post
        )
        self._activity = activity
        self._errors = ErrorReporter(max_errors)
        self._modules: dict[str, Any] = {}
        self._workers: set[str] = set()
        self._step = 0

    def start(self, module: str, work: str) -> str:
        """Begin work; return its token."""
        return self._activity.start(module, work)

    def end(self, token: str) -> None:
        self._activity.end(token)

    def is_quiescent(self) -> bool:
        return self._activity.is_quiescent()

    def wait_quiescent(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight; return whether that came about."""
        return self._activity.wait_quiescent(threading.TIMEOUT_MAX if timeout is None else timeout)

    def is_rollout_worker_quiescent(self) -> bool:
        """Return whether no registered rollout worker has work in flight."""
        return all(self._activity.is_quiescent(name) for name in self._workers)

    def get_running_status_summary(self) -> str:
        return self._activity.summary()

    def register_module(self, module_name: str, module_ref: Any, is_rollout_worker: bool = False) -> None:
        """Register a module, here or as an actor of `RayResourceManager`, for `check_module_liveness`."""
        self._modules[module_name] = module_ref
        if is_rollout_worker:
            self._workers.add(module_name)

    def check_module_liveness(self, timeout: float = 5.0) -> bool:
        """Return whether every registered module is alive. A module that does not answer in time counts as dead."""
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

    def report_exception(
        self, module: str, work: str, exception: Exception, severity: ErrorSeverity | None = None
    ) -> str:
        """Keep an error; return its id."""
        return self._errors.report_exception(module, work, exception, severity or ErrorSeverity.ERROR)

    def get_error_health_status(self) -> dict[str, Any]:
        """Return `status`, `message`, `recent_error_count`, `error_level_count` and `warning_level_count`."""
        return self._errors.get_health_status()

    def set_training_step(self, step: int) -> None:
        self._step = step

    def get_training_step(self) -> int:
        return self._step

    def experiment_logger_post(self, backend: str, **posted: Any) -> None:
        """Hand metrics or a message to a logging backend."""
        self.experiment_logger.post(backend, **posted)


class ActivityTrackerProxy(_Tracking):
    """A tracker that is elsewhere: every method of it, carried out there, if it is an actor of `RayResourceManager`."""

    def __init__(self, central_tracker: Any) -> None:
        self._central = central_tracker

    def __getattr__(self, name: str) -> Any:
        return functools.partial(execute, getattr(self._central, name))


def execute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function, or of an actor's method, after waiting for it."""
    if not hasattr(func, "remote"):
        return func(*args, **kwargs)
    import ray

    return ray.get(func.remote(*args, **kwargs))


def execute_async(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function, or Ray's reference to that of an actor's method."""
    return func.remote(*args, **kwargs) if hasattr(func, "remote") else func(*args, **kwargs)
