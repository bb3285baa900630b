"""The start of a training session, without the SDK until it is needed."""

from __future__ import annotations

from typing import Any

from roundhouse.config.models import TrainConfig
from roundhouse.config.secrets import read_secret
from roundhouse.errors import ConfigError
from roundhouse.training.service.verbs import ServiceArguments, TrainService


def open_tinker(config: TrainConfig, arguments: ServiceArguments) -> TrainService:
    """Open a training session of Tinker's API.

    Raises:
        ConfigError: the SDK is not installed, or the key cannot be read.
    """
    try:
        from roundhouse.plugins.tinker.service import TinkerPointer, TinkerTrainService
    except ImportError as error:
        raise ConfigError(
            f"train.service.kind is tinker, which needs its SDK: pip install tinker ({error})."
        ) from error
    service: Any = config.service
    return TinkerTrainService(
        config.optimizer,
        TinkerPointer(base_model=service.base_model, lora_rank=service.lora_rank),
        run=arguments.owner,
        base_url=service.url,
        api_key=read_secret(service.token_variable, service.token_file),
        timeout_seconds=service.timeout_seconds,
    )
