"""From `train.service` to a train service.

Invariant: what is opened here is closed by whoever opened it; nothing is shared between two calls.
"""

from __future__ import annotations

from roundhouse.config.models import TrainConfig
from roundhouse.config.secrets import read_secret
from roundhouse.config.train_service import ProcessService, RayService, RemoteService, ResidentService
from roundhouse.errors import ConfigError
from roundhouse.training.service.verbs import TrainService


def open_service(
    config: TrainConfig, *, owner: str, temperature: float, placement_group: str | None = None
) -> TrainService:
    """The service that `config.service` names.

    Args:
        owner: who trains; a remote service tells runs apart by it.
        placement_group: id of Ray's, in whose last bundle an actor is to be.

    Raises:
        ConfigError: the service is one process a step, which has no verbs, or a token cannot be read.
        InfraError: Ray cannot be reached.
    """
    service = config.service
    if isinstance(service, ResidentService):
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
