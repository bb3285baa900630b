"""The train service as a Ray actor: weights resident on a node of the cluster, verbs from anywhere in it.

Invariant: between driver and actor travel bytes only, in the form of `protocol` and `wire`, so that nothing depends on the two
sides unpickling each other's classes. The actor does one call at a time; when it dies, its weights are lost and the call raises
`InfraError`: it is never restarted without the driver.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roundhouse.config.models import TrainConfig
from roundhouse.config.training import RayService
from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.training.service import protocol
from roundhouse.training.service.served import OpenEngine, ServedTrainEngine
from roundhouse.training.service.wire import ChannelService

CONNECT_SECONDS = 10.0
ENDING_SECONDS = 10.0
"""For an actor to end its engine and to clean up, before it is killed."""
NAMING_SECONDS = 20.0
"""Extra time for an actor with ranks to find and name a hanging one, beyond the time limit of a verb."""


class TrainActor:
    """A served engine in an actor. If the engine cannot start, each verb is answered with the reason."""

    def __init__(self, config: str, temperature: float, open_engine: OpenEngine | None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="roundhouse-train-")
        settings = TrainConfig.model_validate_json(config)
        self._engine = ServedTrainEngine(None, settings, Path(self._scratch.name), open_engine=open_engine)
        self._refused: protocol.CallReply | None = None
        try:
            self._engine.begin(settings, temperature)
        except RoundhouseError as error:  # raised from here, it would be the actor's loss
            self._refused = protocol.refusal(error)

    def answer(self, verb: str, body: bytes) -> tuple[int, bytes]:
        """A verb's HTTP status and body."""
        answer = self._refused or self._engine.answer(verb, body)
        return answer.status, answer.body

    def end(self) -> None:
        """End the engine, and leave nothing on the disk: an actor that is killed cleans up nothing."""
        try:
            self._engine.end()
        finally:
            self._scratch.cleanup()


class RayTrainService(ChannelService):
    """The verbs of `verbs.TrainService` on an actor that lives as long as this object is open.

    Args:
        placement_group: ID of the group that holds the actor in its last bundle; None: anywhere.
        open_engine: a function of a module, as for `ServedTrainEngine`, that makes the actor's engine.

    Raises:
        InfraError: the cluster cannot be reached, or lacks the group.
    """

    def __init__(
        self,
        config: TrainConfig,
        service: RayService,
        *,
        temperature: float = 1.0,
        placement_group: str | None = None,
        open_engine: OpenEngine | None = None,
    ) -> None:
        join_cluster(service.address, "train.service.address")
        options: dict[str, Any] = {"num_cpus": service.cpus, "num_gpus": service.gpus, "max_restarts": 0}
        if placement_group is not None:
            options["scheduling_strategy"] = last_bundle_of(placement_group)
        actor = ray.remote(TrainActor).options(**options).remote(config.model_dump_json(), temperature, open_engine)
        waits = service.timeout_seconds + (NAMING_SECONDS if service.processes > 1 else 0.0)
        super().__init__(ActorChannel(actor, waits, service.timeout_seconds))


def join_cluster(address: str | None, key: str) -> None:
    """Make this process a driver of a cluster: of `address`, else of the cluster that started it, else of a new one. The
    machine's last cluster is not used, because it may be dead. `key` is the configuration key of the address.

    Raises:
        InfraError: the cluster cannot be reached.
    """
    if ray.is_initialized():
        return
    # A stage runs in a thread, in which Ray cannot handle SIGTERM and warns; the flow's process handles the signal.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    cluster = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        host, separator, port = cluster.rpartition(":")
        if separator and "//" not in host:  # Ray ends the whole process if a head does not answer
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        _take_environment()
        ray.init(address=cluster, log_to_driver=False, configure_logging=False)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise InfraError(f"The Ray cluster ({key}: {cluster}) cannot be joined: {error}") from error


def _take_environment() -> None:
    """Let Ray read again how its cluster is reached: on the loopback interface or not, with a token or without.

    Ray reads it when it is imported. A process that imported Ray before the services started would look for their cluster at
    the machine's address, and be refused there.
    """
    constants = ray._private.ray_constants
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not constants.IS_WINDOWS_OR_OSX
    )
    library: Any = ray._raylet
    library.Config.initialize("")
    library.AuthenticationTokenLoader.instance().reset_cache()


def last_bundle_of(placement_group: str) -> PlacementGroupSchedulingStrategy:
    """Return the scheduling strategy for the group's last bundle.

    Raises:
        InfraError: the cluster lacks the group.
    """
    description = placement_group_table().get(placement_group)
    if description is None or description["state"] != "CREATED":
        state = "unknown here" if description is None else description["state"]
        raise InfraError(
            f"The placement group {placement_group}, in which the trainer has its place near the engine, is {state}. Is "
            "train.service.address the cluster that the engine is on? Leave it unset to take the flow's."
        )
    group = PlacementGroup(PlacementGroupID(bytes.fromhex(placement_group)))
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=len(description["bundles"]) - 1)


class ActorChannel:
    """A handle's calls; each is waited for so many seconds, of which `timeout_seconds` are the configured limit."""

    def __init__(self, actor: Any, waits: float, timeout_seconds: float) -> None:
        self.actor, self.waits, self.timeout_seconds = actor, waits, timeout_seconds

    def ask(self, verb: str, body: bytes) -> bytes:
        return protocol.accepted(*self._call("answer", verb, body))

    def change(self, verb: str, body: bytes) -> bytes:
        return protocol.accepted(*self._call("answer", verb, body))

    def close(self) -> None:
        if ray.is_initialized():
            try:
                with suppress(RayError):  # it hangs, is gone, or never found room
                    ray.get(self.actor.end.remote(), timeout=ENDING_SECONDS)
            finally:
                ray.kill(self.actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=self.waits)
        except GetTimeoutError as error:
            raise InfraError(
                f"The train actor did not answer {method} within train.service.timeout_seconds ({self.timeout_seconds:.0f} s). "
                "Has the cluster the CPUs and GPUs that train.service asks for?"
            ) from error
        except RayError as error:
            raise InfraError(f"The train actor was lost, and its weights with it: {error}") from error
