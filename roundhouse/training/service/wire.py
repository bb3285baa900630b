"""The verbs' data as bytes: one safetensors file, arrays by field name, everything else as JSON in its header.

Invariant: `unpack(kind, pack(value))` equals `value`, bit for bit in every array. `unpack` rejects data that the engine
could not use:
each field must be present with its type, no others, and the arrays must fit each other.

    LossBatch   tokens.offsets  tokens.token_ids  tokens.predicted  columns.advantages  …  gen_logprobs  scale
                header: {"loss": {"clip_low": 0.2, …}}

`ChannelService` offers the verbs through a channel to a served engine; a network client, a Ray handle and the driver of
resident ranks share it. Bodies are those of `protocol` and of this module; checkpoints stay in the store.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.store.directories import ModelSource, StoredModel
from roundhouse.store.location import Location
from roundhouse.store.stage import ModelFiles
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.service import protocol
from roundhouse.training.service.verbs import Applied, Gradient, LossBatch, ModelFacts, Role, TokenBatch, ValueBatch
from roundhouse.weight_sync.sending import TransferBegun, WeightOffer

T = TypeVar("T")

_HEADER = "roundhouse"
_DTYPES = {"offsets": np.int64, "token_ids": np.int32, "predicted": np.bool_}
"""By field name; every other array is float32."""


def pack(value: Any) -> bytes:
    """One of the data types of `verbs`."""
    arrays: dict[str, np.ndarray] = {}
    header: dict[str, Any] = {}
    _take_apart(value, "", arrays, header)
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, {_HEADER: json.dumps(header)})


def unpack(kind: type[T], body: bytes) -> T:
    """The inverse of `pack`.

    Raises:
        DataError: the body is not such a value.
    """
    try:
        arrays = load(body)
        size = int.from_bytes(body[:8], "little")
        header = json.loads(json.loads(body[8 : 8 + size])["__metadata__"][_HEADER])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The body is not a {kind.__name__}: {error!r}.") from error
    if not isinstance(header, dict):
        raise DataError(f"The body is not a {kind.__name__}: its header is a {type(header).__name__}.")
    value = _put_together(kind, "", arrays, header)
    if arrays or header:
        raise DataError(
            f"The body has fields that {kind.__name__} does not: {', '.join(sorted([*arrays, *header]))}. Run the same version "
            "of roundhouse on both sides."
        )
    # Constraints beyond the types of single fields
    if isinstance(value, TokenBatch):
        _check_tokens(value)
    elif isinstance(value, LossBatch | ValueBatch):
        _check_tokens(value.tokens)
        length = len(value.tokens.token_ids)
        for name, array in _arrays_of(value):
            if name not in _DTYPES and len(array) != length:
                raise DataError(f"{name} has {len(array)} values for {length} tokens. They must be equally long.")
            if name not in _DTYPES and not np.isfinite(array).all():
                raise DataError(f"{name} holds a value that is not finite.")
    elif isinstance(value, Gradient) and value.log_probs.ndim != 1:
        raise DataError(
            f"log_probs has the shape {value.log_probs.shape}. Send one dimension, with a value for each token."
        )
    return value


def _take_apart(value: Any, prefix: str, arrays: dict[str, np.ndarray], header: dict[str, Any]) -> None:
    for field in fields(value):
        part, name = getattr(value, field.name), prefix + field.name
        if isinstance(part, np.ndarray):
            arrays[name] = part
        elif _has_arrays(type(part)):
            _take_apart(part, f"{name}.", arrays, header)
        elif part is not None:
            header[name] = TypeAdapter(_hints(type(value))[field.name]).dump_python(part, mode="json")


def _put_together(kind: type[T], prefix: str, arrays: dict[str, np.ndarray], header: dict[str, Any]) -> T:
    values: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        full = prefix + name
        if _has_arrays(hint):
            values[name] = _put_together(hint, f"{full}.", arrays, header)
        elif full in arrays:
            array, dtype = arrays.pop(full), _DTYPES.get(name, np.float32)
            if array.ndim != 1 or array.dtype != dtype:
                raise DataError(
                    f"{full} is {array.dtype} of shape {array.shape}, it has to be {np.dtype(dtype)} of one dimension."
                )
            values[name] = array
        elif full in header:
            values[name] = _json(full, hint, header.pop(full))
        elif type(None) in getattr(hint, "__args__", ()):
            values[name] = None
        else:
            raise DataError(f"The body has no {full}, which {kind.__name__} needs.")
    return kind(**values)


def _json(name: str, hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(value, Mapping):
        known = {field.name for field in fields(hint)}
        if unknown := sorted(set(value) ^ known):
            raise DataError(
                f"{name} differs in {', '.join(unknown)} from this side. Run the same version of roundhouse on both "
                "sides."
            )
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise DataError(f"{name} is not valid: {error}") from error


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _has_arrays(kind: Any) -> bool:
    return (
        is_dataclass(kind)
        and isinstance(kind, type)
        and any(
            hint is np.ndarray or np.ndarray in getattr(hint, "__args__", ()) or _has_arrays(hint)
            for hint in _hints(kind).values()
        )
    )


def _arrays_of(value: Any) -> Iterator[tuple[str, np.ndarray]]:
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, np.ndarray):
            yield field.name, part
        elif _has_arrays(type(part)):
            yield from _arrays_of(part)


def _check_tokens(batch: TokenBatch) -> None:
    offsets, length = batch.offsets, len(batch.token_ids)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != length or (np.diff(offsets) < 1).any():
        raise DataError(f"offsets do not cut {length} tokens into sequences of at least one token.")
    if len(batch.predicted) != length:
        raise DataError(f"predicted has {len(batch.predicted)} values for {length} tokens. They must be equally long.")
    if batch.predicted[offsets[:-1]].any():
        raise DataError("predicted holds the first token of a sequence, which nothing predicts.")
    if not np.logical_or.reduceat(batch.predicted, offsets[:-1]).all():
        raise DataError("A sequence has no predicted token.")
    if (batch.token_ids < 0).any():
        raise DataError("token_ids holds a negative id.")


class Channel(Protocol):
    """The way to a served engine. Everything raises `InfraError` when the other side is lost."""

    def ask(self, verb: str, body: bytes) -> bytes:
        """One of `protocol.READING`."""
        ...

    def change(self, verb: str, body: bytes) -> bytes:
        """One of `protocol.CHANGING`, done exactly once when this returns."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


class ChannelService:
    """The verbs of `verbs.TrainService` through a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._facts: ModelFacts | None = None

    def facts(self) -> ModelFacts:
        if self._facts is None:
            self._facts = ModelFacts(**json.loads(self.channel.ask("facts", b"")))
        return self._facts

    def forward(self, batch: TokenBatch, role: Role = Role.POLICY) -> np.ndarray:
        log_probs = unpack(protocol.LogProbs, self.channel.ask(f"forward/{role}", pack(batch))).log_probs
        _require_length(log_probs, batch)
        return log_probs

    def forward_backward(self, batch: LossBatch) -> Gradient:
        gradient = unpack(Gradient, self.channel.change("forward_backward", pack(batch)))
        _require_length(gradient.log_probs, batch.tokens)
        return gradient

    def value_backward(self, batch: ValueBatch) -> Gradient:
        gradient = unpack(Gradient, self.channel.change("value_backward", pack(batch)))
        _require_length(gradient.log_probs, batch.tokens)
        return gradient

    def optim_step(self, learning_rate: float, max_grad_norm: float, role: Role = Role.POLICY) -> Applied:
        request = protocol.OptimStep(learning_rate=learning_rate, max_grad_norm=max_grad_norm, role=role)
        return Applied(**json.loads(self.channel.change("optim_step", request.model_dump_json().encode())))

    def load_checkpoint(
        self, directory: ModelSource, *, trainer_state: ModelSource | None = None, role: Role = Role.POLICY
    ) -> Cursor:
        request = loading(directory, trainer_state, role)
        self._facts = None
        return Cursor.model_validate_json(self.channel.change("load_checkpoint", request.model_dump_json().encode()))

    def store_checkpoint(
        self, place: Location, attempt: str, cursor: Cursor | None, *, weights: bool = True
    ) -> ModelFiles:
        if place.is_local:
            place.local_path.mkdir(parents=True, exist_ok=True)  # the service refuses a directory that it cannot see
        request = protocol.StoreCheckpoint(place=place.uri, attempt=attempt, cursor=cursor, weights=weights)
        written = ModelFiles.model_validate_json(
            self.channel.change("store_checkpoint", request.model_dump_json().encode())
        )
        if not place.exists(written.files[0].path):
            raise ConfigError(
                f"The train service has written {place.uri}/{written.directory}, which does not exist here: the path is "
                "another directory on its machine. Set store to s3://… or to a path that both machines share."
            )
        return written

    def save_checkpoint(self, directory: Path, cursor: Cursor | None) -> None:
        written = self.store_checkpoint(Location(str(directory)), "0001", cursor)
        for name, entry in written.by_name().items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(directory / entry.path, directory / name)
        shutil.rmtree(directory / written.directory)

    def begin_transfer(self, offer: WeightOffer, digest: str) -> TransferBegun:
        request = protocol.BeginTransfer(offer=offer, digest=digest).model_dump_json().encode()
        return TransferBegun.model_validate_json(self.channel.change("begin_transfer", request))

    def end_transfer(self) -> None:
        self.channel.change("end_transfer", b"")

    def close(self) -> None:
        self.channel.close()


def loading(directory: ModelSource, trainer_state: ModelSource | None, role: Role) -> protocol.LoadCheckpoint:
    """The request of `load_checkpoint`."""
    state = None if trainer_state is None else _named(trainer_state)
    return protocol.LoadCheckpoint(role=role, model=_named(directory), trainer_state=state)


def _named(source: ModelSource) -> StoredModel:
    return StoredModel(uri=Location(str(source)).uri) if isinstance(source, Path) else source


def _require_length(log_probs: np.ndarray, batch: TokenBatch) -> None:
    if len(log_probs) != len(batch.token_ids):
        raise InfraError(
            f"The train service answered {len(log_probs)} log-probabilities for {len(batch.token_ids)} tokens."
        )
