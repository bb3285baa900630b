"""The train service that the configuration names: in this process, ranks of its own, a Ray actor, or a server elsewhere.

Invariant: whichever it is, the caller has the verbs of `verbs.TrainService`, and what it computes is the same.
"""

from __future__ import annotations

from roundhouse.config.models import TrainConfig
from roundhouse.config.secrets import read_secret
from roundhouse.config.training import ProcessService, RayService, RemoteService, ResidentService
from roundhouse.errors import ConfigError
from roundhouse.training.service.verbs import TrainService


def open_service(
    config: TrainConfig, *, owner: str, temperature: float, placement_group: str | None = None
) -> TrainService:
    """The service that `config.service` names, to be closed by the caller; nothing is shared between two calls.

    Args:
        owner: who trains; a remote service tells runs apart by it.
        placement_group: id of Ray's, in whose last bundle an actor is to be.

    Raises:
        ConfigError: the service is one process a step, which has no verbs, or a token cannot be read.
        InfraError: Ray cannot be reached, or ranks do not start.
    """
    service = config.service
    if isinstance(service, ResidentService):
        if service.processes > 1:
            from roundhouse.launch.resident_ranks import ResidentRanks

            return ResidentRanks(config, service, owner=owner, temperature=temperature)
        from roundhouse.training.service.engine import TrainEngine

        return TrainEngine(config, temperature=temperature)
    if isinstance(service, RayService):
        from roundhouse.training.service.actor import RayTrainService

        return RayTrainService(config, service, temperature=temperature, placement_group=placement_group)
    if isinstance(service, RemoteService):
        from roundhouse.training.service.client import RemoteTrainService

        return RemoteTrainService(
            service.url,
            config,
            owner=owner,
            token=read_secret(service.token_variable, service.token_file),
            temperature=temperature,
            timeout_seconds=service.timeout_seconds,
            retry_seconds=service.retry_seconds,
        )
    assert isinstance(service, ProcessService)
    raise ConfigError(
        "train.service.kind is process: it runs whole steps, not single verbs. Use resident, ray or remote."
    )
