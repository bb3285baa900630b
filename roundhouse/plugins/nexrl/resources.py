"""NexRL's resource manager, for a user's training loop: roles as Ray actors; roles of one group share an actor.

Invariant: the actors of a colocation group hold an object of each of its roles, in the group's number of actors. A role
without a group has its own actors. The caller of a role sees no difference.

    manager = RayResourceManager()
    manager.register_role(NexRLRole.DATA_LOADER, Loader, config, 1, colocation_group="main")
    manager.register_role(NexRLRole.TRAJECTORY_POOL, Pool, config, 1, colocation_group="main")
    manager.create_all_actors()                                    one actor, with data_loader_… and trajectory_pool_…
    [pool] = manager.get_actor_wrapper(NexRLRole.TRAJECTORY_POOL)
    execute(pool.put_trajectory, trajectory)                       waits; execute_async does not
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roundhouse.errors import ConfigError


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
class Registration:
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
        self._registered: dict[NexRLRole, Registration] = {}
        self._wrappers: dict[NexRLRole, list[RayActorWrapper]] = {}
        self._actors: list[Any] = []

    def register_role(
        self, role: NexRLRole, cls: type, config: Any, count: int, colocation_group: str | None = None
    ) -> None:
        """Register `count` objects `cls(config)` for a role.

        Args:
            colocation_group: roles with the same group share an actor; None: separate actors.

        Raises:
            ConfigError: the role is registered, the actors exist already, or the count differs from the group's.
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
        self._registered[role] = Registration(role, cls, config, count, colocation_group)

    def create_all_actors(self) -> None:
        """Start every actor and wait until each has made its objects.

        Raises:
            InfraError: the cluster cannot be reached.
            ray.exceptions.RayActorError: a constructor raised.
        """
        import ray

        from roundhouse.training.service.actor import join_cluster

        join_cluster(None, "RAY_ADDRESS")
        groups: dict[str, list[Registration]] = {}
        for each in self._registered.values():  # roles that share an actor, in the order of their registration
            groups.setdefault(each.colocation_group or f"\0{each.role}", []).append(each)
        for together in groups.values():
            colocated = together[0].colocation_group is not None
            actor_class: Any = ray.remote(colocated_actor(together) if colocated else together[0].cls)
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
        """End the actors and their work."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._wrappers.clear()


def methods_of(cls: type) -> list[str]:
    """Names of the public methods of a class and its bases."""
    return [name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]


def colocated_actor(together: list[Registration]) -> type:
    """Return a class that holds an object of each role; its method names begin with the role's name."""

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
