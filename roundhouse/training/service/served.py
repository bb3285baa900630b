"""Engine of a train service: from request bodies to answers, with checkpoints in the store.

Invariant: `answer` never raises; every error is an answer with a kind and a message. A request that does not fit the
model is refused before it reaches torch. The owner of a served engine runs one call at a time.

The process that holds the weights, or its ranks, loads and writes checkpoints: on a file store in place, from a bucket
through a directory of this machine. The driver publishes them with a manifest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError, StoreError
from roundhouse.store.directories import LoadedModels, StoredModel
from roundhouse.store.location import Location, NotFound
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.protocol import (
    ARRAYS,
    BeginTransfer,
    CallReply,
    LoadCheckpoint,
    LogProbs,
    OptimStep,
    StoreCheckpoint,
    parse,
    refusal,
)
from roundhouse.training.service.verbs import LossBatch, ModelFacts, Role, TokenBatch, TrainService, ValueBatch
from roundhouse.training.service.wire import pack, unpack
from roundhouse.weight_sync.sending import WeightHolder

logger = logging.getLogger(__name__)

_NO_ARCHITECTURE = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
"""Keys of config.json that affect neither shapes nor computation."""


OpenEngine = Callable[[TrainConfig, float], TrainService]
"""Makes the engine of a session, given its configuration and temperature."""


class ServedTrainEngine:
    """An engine for the session that is open, of one architecture."""

    def __init__(
        self,
        model: Path | None,
        machine: TrainConfig,
        scratch: Path,
        *,
        open_engine: OpenEngine | None = None,
    ) -> None:
        """Args:
        model: Hugging Face directory; checkpoints of another architecture are refused. None takes the first one's.
        machine: its `device` and `threads` are used.
        scratch: an empty directory; of a store that is a bucket, on a disk with room for two checkpoints.
        open_engine: None makes an engine in this process.
        """
        self._open_engine = open_engine or (lambda config, temperature: TrainEngine(config, temperature=temperature))
        self.architecture = None
        if model is not None:
            self.architecture = _architecture(lambda name: (model / name).read_bytes(), str(model))
        self._machine, self._models = machine, LoadedModels(scratch / "cache")
        self._engine: TrainService | None = None

    def answer(self, verb: str, body: bytes) -> CallReply:
        """Do one verb of `protocol.VERBS`; its failure is its answer."""
        works: dict[str, Callable[[bytes], CallReply]] = {
            "facts": lambda body: _json(asdict(self._held().facts())),
            **{f"forward/{role}": partial(self._forward, role=role) for role in Role},
            "forward_backward": self._forward_backward,
            "value_backward": self._value_backward,
            "optim_step": self._optim_step,
            "load_checkpoint": self._load_checkpoint,
            "store_checkpoint": self._store_checkpoint,
            "begin_transfer": self._begin_transfer,
            "end_transfer": self._end_transfer,
        }
        try:
            return works[verb](body)
        except StoreError as error:
            return refusal(type(error)(f"On the train service, which reads and writes the store itself: {error}"))
        except RoundhouseError as error:
            return refusal(error)
        except Exception as error:  # what torch raises on any fault of a device or of memory
            logger.exception("%s failed", verb)
            return refusal(InfraError(f"{verb} failed on the train service: {error!r}"))

    def begin(self, config: TrainConfig, temperature: float) -> None:
        """An engine without weights, in place of the one before."""
        self.end()
        own = {"device": self._machine.device, "threads": self._machine.threads}
        self._engine = self._open_engine(config.model_copy(update=own), temperature)

    def end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _forward(self, body: bytes, role: Role) -> CallReply:
        batch = unpack(TokenBatch, body)
        self._require_fits(batch)
        return _arrays(LogProbs(self._held().forward(batch, role)))

    def _forward_backward(self, body: bytes) -> CallReply:
        batch = unpack(LossBatch, body)
        self._require_fits(batch.tokens)
        return _arrays(self._held().forward_backward(batch))

    def _value_backward(self, body: bytes) -> CallReply:
        batch = unpack(ValueBatch, body)
        self._require_fits(batch.tokens)
        return _arrays(self._held().value_backward(batch))

    def _optim_step(self, body: bytes) -> CallReply:
        request = parse(OptimStep, body)
        return _json(asdict(self._held().optim_step(request.learning_rate, request.max_grad_norm, request.role)))

    def _load_checkpoint(self, body: bytes) -> CallReply:
        request = parse(LoadCheckpoint, body)
        model, state = self._reached(request.model), request.trainer_state and self._reached(request.trainer_state)
        served = None if request.role is Role.CRITIC else self.architecture
        if served is not None and (architecture := _architecture(model.read_file, str(model))) != served:
            key = min(key for key in architecture.keys() | served.keys() if architecture.get(key) != served.get(key))
            raise DataError(
                f"The checkpoint is of another architecture than the service: {key} is {architecture.get(key)!r}, "
                f"the service's {served.get(key)!r}. Start a service with that model."
            )
        cursor = self._held().load_checkpoint(model, trainer_state=state, role=request.role)
        self._models.loaded(request.role, model)
        return _json(cursor.model_dump())

    def _store_checkpoint(self, body: bytes) -> CallReply:
        request = parse(StoreCheckpoint, body)
        _require_seen(request.place)
        place = Location(request.place)
        written = self._held().store_checkpoint(place, request.attempt, request.cursor, weights=request.weights)
        return _json(written.model_dump())

    def _begin_transfer(self, body: bytes) -> CallReply:
        request = parse(BeginTransfer, body)
        return _json(self._holder().begin_transfer(request.offer, request.digest).model_dump())

    def _end_transfer(self, body: bytes) -> CallReply:
        self._holder().end_transfer()
        return _json(None)

    def _holder(self) -> WeightHolder:
        if not isinstance(holder := self._held(), WeightHolder):
            raise ConfigError("This train service cannot send weights.")
        return holder

    def _reached(self, model: StoredModel) -> StoredModel:
        _require_seen(model.uri)
        return self._models.here(model)

    def _held(self) -> TrainService:
        if self._engine is None:
            raise DataError("No session is open.")
        return self._engine

    def _require_fits(self, batch: TokenBatch) -> None:
        facts: ModelFacts = self._held().facts()
        if (highest := int(batch.token_ids.max())) >= facts.vocabulary:
            raise DataError(f"token_ids holds {highest}, but the model's vocabulary ends at {facts.vocabulary - 1}.")
        longest = int(np.diff(batch.offsets).max()) - 1  # nothing reads a last token, which is predicted or left out
        if facts.positions is not None and longest > facts.positions:
            raise DataError(f"A sequence has {longest + 1} tokens, but the model has {facts.positions} positions.")


def _arrays(value: Any) -> CallReply:
    return CallReply(200, pack(value), ARRAYS)


def _json(value: Any) -> CallReply:
    return CallReply(200, json.dumps(value).encode(), "application/json")


def _architecture(read: Callable[[str], bytes], model: str) -> dict[str, Any]:
    try:
        config = json.loads(read("config.json"))
    except (OSError, ValueError, NotFound) as error:
        raise ConfigError(f"{model} has no readable config.json: it is not a Hugging Face model directory.") from error
    return {key: value for key, value in config.items() if key not in _NO_ARCHITECTURE}


def _require_seen(uri: str) -> None:
    """Refuse a directory of a file store that this machine does not have, rather than make one of its name."""
    location = Location(uri)
    if location.is_local and not location.local_path.is_dir():
        raise ConfigError(
            f"{uri} is not on the train service's machine, which reads and writes checkpoints in the store itself. Set store "
            "(of a model, its path) to s3://… or to a path that both machines share."
        )
