"""The built-in train services: a function for each kind of `train.service` that opens its verbs.

Invariant: all kinds compute the same; a kind imports its libraries when it is opened.
"""

from __future__ import annotations

from typing import Any

from roundhouse.config.models import TrainConfig
from roundhouse.config.placement import has_ranks
from roundhouse.config.secrets import read_secret
from roundhouse.errors import ConfigError
from roundhouse.training.service.verbs import ServiceArguments, TrainService


def open_resident(config: TrainConfig, arguments: ServiceArguments) -> TrainService:
    """Open the trainer of this process, or ranks of a launcher.

    Raises:
        ConfigError: the launcher starts programs on other machines without a run.
        InfraError: the ranks do not start.
    """
    service: Any = config.service
    if has_ranks(service) or arguments.apart:
        from roundhouse.launch.resident_ranks import ResidentRanks

        return ResidentRanks(
            config, service, owner=arguments.owner, temperature=arguments.temperature, at=arguments.run_and_iteration
        )
    from roundhouse.training.service.engine import TrainEngine

    return TrainEngine(config, temperature=arguments.temperature)


def open_ray(config: TrainConfig, arguments: ServiceArguments) -> TrainService:
    """Open an actor on a Ray cluster.

    Raises:
        InfraError: Ray cannot be reached.
    """
    from roundhouse.launch.resident_ranks import open_ranks
    from roundhouse.training.service.actor import RayTrainService

    service: Any = config.service
    return RayTrainService(
        config,
        service,
        temperature=arguments.temperature,
        placement_group=arguments.placement_group,
        open_engine=open_ranks,
    )


def open_remote(config: TrainConfig, arguments: ServiceArguments) -> TrainService:
    """Open a session at a server.

    Raises:
        ConfigError: the token cannot be read.
    """
    from roundhouse.training.service.client import RemoteTrainService

    service: Any = config.service
    return RemoteTrainService(
        service.url,
        config,
        owner=arguments.owner,
        token=read_secret(service.token_variable, service.token_file),
        temperature=arguments.temperature,
        timeout_seconds=service.timeout_seconds,
        retry_seconds=service.retry_seconds,
    )


def refuse_process(config: TrainConfig, arguments: ServiceArguments) -> TrainService:
    """Raise ConfigError: a process for each step does not offer the verbs."""
    raise ConfigError(
        "train.service.kind is process: it runs whole steps, not single verbs. Use resident, ray or remote."
    )
