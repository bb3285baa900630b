"""Roles of one group share Ray actors, as many as its count; roles without a group have separate actors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from roundhouse.errors import ConfigError
from roundhouse.plugins.nexrl import NexRLRole, RayResourceManager, execute, execute_async

ROLE = NexRLRole


def make_loader() -> type:
    """A class of a script: Ray sends it whole, since no module of it can be imported there."""

    class Loader:
        def __init__(self, config: dict[str, Any]) -> None:
            self.items = list(config["items"])

        def next(self, default: str = "") -> str:
            return self.items.pop(0) if self.items else default

        def where(self) -> int:
            return os.getpid()

        async def count(self) -> int:
            return len(self.items)

        def _private(self) -> None: ...

    return Loader


@pytest.fixture
def manager() -> Iterator[RayResourceManager]:
    made = RayResourceManager()
    yield made
    made.close()
    ray.shutdown()


@pytest.mark.real
@pytest.mark.timeout(300)
def test_roles_of_a_group_share_actors_and_others_do_not(manager: RayResourceManager) -> None:
    loader = make_loader()
    manager.register_role(ROLE.DATA_LOADER, loader, {"items": "ab"}, 2, colocation_group="main")
    manager.register_role(ROLE.TRAJECTORY_POOL, loader, {"items": "xyz"}, 2, colocation_group="main")
    manager.register_role(ROLE.VALIDATOR, loader, {"items": ""}, 1)
    with pytest.raises(ConfigError, match="call create_all_actors first"):
        manager.get_actor_wrapper(ROLE.VALIDATOR)
    manager.create_all_actors()
    loaders, pools, validators = map(
        manager.get_actor_wrapper, (ROLE.DATA_LOADER, ROLE.TRAJECTORY_POOL, ROLE.VALIDATOR)
    )
    assert (len(loaders), len(pools), len(validators)) == (2, 2, 1)
    assert manager.get_actor_wrapper(ROLE.TRAINER) == []
    places = [[execute(each.where) for each in role] for role in (loaders, pools, validators)]
    assert places[0] == places[1], "one actor for both roles, twice"
    assert len({*places[0], *places[2], os.getpid()}) == 4
    assert [execute(loaders[0].next), execute(pools[0].next), execute(loaders[1].next)] == ["a", "x", "a"]
    assert ray.get(execute_async(pools[0].count)) == 2, "an object of its own for each role"
    assert execute(validators[0].next, default="none") == "none"
    assert hasattr(loaders[0].actor, "data_loader_next")
    assert not hasattr(validators[0].actor, "validator_next")
    assert not hasattr(loaders[0], "_private")
    with pytest.raises(ConfigError, match="after create_all_actors"):
        manager.register_role(ROLE.TRAINER, loader, {}, 1)


def test_what_cannot_be_shared_is_refused() -> None:
    manager = RayResourceManager()
    manager.register_role(ROLE.DATA_LOADER, object, {}, 2, colocation_group="main")
    manager.register_role(ROLE.VALIDATOR, object, {}, 1, colocation_group="validation")
    with pytest.raises(ConfigError, match=r"trajectory_pool: count is 1, but data_loader .*'main' has 2"):
        manager.register_role(ROLE.TRAJECTORY_POOL, object, {}, 1, colocation_group="main")
    with pytest.raises(ConfigError, match="data_loader is registered twice"):
        manager.register_role(ROLE.DATA_LOADER, object, {}, 2)
    with pytest.raises(ConfigError, match="count is 0"):
        manager.register_role(ROLE.TRAINER, object, {}, 0)


def test_without_ray_a_function_is_called_here() -> None:
    assert execute(max, 1, 2) == execute_async(max, 1, 2) == 2
