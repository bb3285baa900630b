"""NexRL's resource manager, for a loop of your own: roles as Ray actors, several in one actor where they share a group.

Invariant: roles of one colocation group are in one actor, as often as the group's count says, and each keeps an object of its
own there; a role without a group has actors to itself. Whoever calls a role does not see the difference.

    manager = RayResourceManager()
    manager.register_role(NexRLRole.DATA_LOADER, Loader, config, 1, colocation_group="main")
    manager.register_role(NexRLRole.TRAJECTORY_POOL, Pool, config, 1, colocation_group="main")
    manager.create_all_actors()                                    one actor, with data_loader_… and trajectory_pool_…
    [pool] = manager.get_actor_wrapper(NexRLRole.TRAJECTORY_POOL)
    execute(pool.put_trajectory, trajectory)                       waits; execute_async does not

Also its activity tracker: NexRL's names for the activity of this process (`roundhouse.activity`) and for the errors of its own.
Work that was started and has not ended is in flight, here and in `roundhouse runs status` alike; a module is alive when its
`health_check` says so in time, and one without such a method is.

    tracker = ActivityTracker()
    tracker.register_module("loader", loader)
    with tracker.track("trainer", "batch 3"): …          an exception is reported, and raised
    tracker.wait_quiescent(60), tracker.check_module_liveness()
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from roundhouse.activity import ACTIVITY, Activity
from roundhouse.errors import ConfigError
from roundhouse.health.errors import KEPT_ERRORS, ErrorReporter, Severity


class NexRLRole(StrEnum):
    """The components of NexRL."""

    ROLLOUT_WORKER = "rollout_worker"
    TRAINER = "trainer"
    TRAJECTORY_POOL = "trajectory_pool"
    WEIGHT_SYNC_CONTROLLER = "weight_sync_controller"
    DATA_LOADER = "data_loader"
    VALIDATE_DATALOADER = "validate_dataloader"
    VALIDATOR = "validator"


@dataclass(frozen=True, slots=True)
class _Registration:
    role: NexRLRole
    cls: type
    config: Any
    count: int
    colocation_group: str | None


class RayActorWrapper:
    """A role in an actor: its public methods as attributes, each with `remote`.

    Args:
        actor: Ray's handle.
        actor_class: the role's class.
        is_colocated: whether the actor's methods begin with the role's name.
    """

    def __init__(self, actor: Any, actor_class: type, role: NexRLRole, is_colocated: bool = True) -> None:
        self.actor, self.role, self.is_colocated = actor, role, is_colocated
        for name in methods_of(actor_class):
            setattr(self, name, getattr(actor, f"{role}_{name}" if is_colocated else name))


class RayResourceManager:
    """Registers roles, then creates their actors; closing it ends them."""

    def __init__(self) -> None:
        self._registered: dict[NexRLRole, _Registration] = {}
        self._wrappers: dict[NexRLRole, list[RayActorWrapper]] = {}
        self._actors: list[Any] = []

    def register_role(
        self, role: NexRLRole, cls: type, config: Any, count: int, colocation_group: str | None = None
    ) -> None:
        """Have `count` objects `cls(config)` for a role.

        Args:
            colocation_group: roles that name the same share an actor; None: actors of its own.

        Raises:
            ConfigError: the role is registered, the actors are there already, or the count is not that of the group.
        """
        if self._wrappers:
            raise ConfigError(f"{role} is registered after create_all_actors. Register every role before it.")
        if role in self._registered:
            raise ConfigError(f"{role} is registered twice. Give its count in one call.")
        if count < 1:
            raise ConfigError(f"{role}: count is {count}. Set it to 1 or more.")
        sharing = [each for each in self._registered.values() if each.colocation_group == colocation_group is not None]
        if sharing and sharing[0].count != count:
            raise ConfigError(
                f"{role}: count is {count}, but {sharing[0].role} of the colocation group {colocation_group!r} has "
                f"{sharing[0].count}: they share actors. Set both to the same number, or another group."
            )
        self._registered[role] = _Registration(role, cls, config, count, colocation_group)

    def create_all_actors(self) -> None:
        """Start every actor and wait until each has made its objects.

        Raises:
            InfraError: the cluster cannot be reached.
            ray.exceptions.RayActorError: a constructor raised.
        """
        import ray

        from roundhouse.training.service.actor import join_cluster

        join_cluster(None, "RAY_ADDRESS")
        groups: dict[str, list[_Registration]] = {}
        for each in self._registered.values():  # roles that share an actor, in the order of their registration
            groups.setdefault(each.colocation_group or f"\0{each.role}", []).append(each)
        for together in groups.values():
            colocated = together[0].colocation_group is not None
            actor_class: Any = ray.remote(_colocated(together) if colocated else together[0].cls)
            arguments = [] if colocated else [together[0].config]
            for _ in range(together[0].count):
                actor = actor_class.remote(*arguments)
                self._actors.append(actor)
                for each in together:
                    wrapper = RayActorWrapper(actor, each.cls, each.role, colocated)
                    self._wrappers.setdefault(each.role, []).append(wrapper)
        ray.get([actor.__ray_ready__.remote() for actor in self._actors])

    def get_actor_wrapper(self, role: NexRLRole) -> list[RayActorWrapper]:
        """The role's, one for each of its count; none of a role that is not registered.

        Raises:
            ConfigError: `create_all_actors` was not called.
        """
        if self._registered and not self._wrappers:
            raise ConfigError(f"{role} has no actors yet: call create_all_actors first.")
        return self._wrappers.get(role, [])

    def close(self) -> None:
        """End the actors, and what they are doing."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._wrappers.clear()


def execute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a function, or of an actor's method, which is waited for."""
    if not hasattr(func, "remote"):
        return func(*args, **kwargs)
    import ray

    return ray.get(func.remote(*args, **kwargs))


def execute_async(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a function, or Ray's reference to that of an actor's method."""
    return func.remote(*args, **kwargs) if hasattr(func, "remote") else func(*args, **kwargs)


def methods_of(cls: type) -> list[str]:
    """Names of the public methods of a class and its bases."""
    return [name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]


def _colocated(together: list[_Registration]) -> type:
    """A class that holds an object of each role, whose methods begin with the role's name."""

    def made(self: Any) -> None:
        self.objects = {each.role: each.cls(each.config) for each in together}

    def prefixed(role: NexRLRole, name: str, method: Any) -> Any:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return await getattr(self.objects[role], name)(*args, **kwargs)

            return call

        @functools.wraps(method)
        def call_now(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.objects[role], name)(*args, **kwargs)

        return call_now

    members: dict[str, Any] = {"__init__": made}
    for each in together:
        for name in methods_of(each.cls):
            members[f"{each.role}_{name}"] = prefixed(each.role, name, getattr(each.cls, name))
    return type(f"Colocated_{together[0].colocation_group}", (), members)


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
