"""The engine of a train service: bodies in, answers out, checkpoints by way of the shelf.

Invariant: `answer` never raises; whatever goes wrong is an answer with a kind and a message. A request that does not fit the
model is refused before it reaches torch. Whoever holds a served engine runs one call at a time.

The shelf holds checkpoint files by their digest, on the server's disk: a file under a digest has that digest. A checkpoint
that the service wrote itself, and the model that it was started with, are never sent to it again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError
from roundhouse.training.service.engine import TrainEngine
from roundhouse.training.service.protocol import (
    ARRAYS,
    CallReply,
    FileList,
    LoadCheckpoint,
    LoadDirectory,
    LogProbs,
    OptimStep,
    SavedCursor,
    SaveDirectory,
    TransferredFile,
    inside,
    list_files,
    parse,
    refusal,
    write_checked,
    write_checked_async,
)
from roundhouse.training.service.verbs import LossBatch, ModelFacts, Role, TokenBatch, TrainService, ValueBatch
from roundhouse.training.service.wire import pack, unpack

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked", LoadDirectory, SaveDirectory)

_NO_ARCHITECTURE = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
"""Keys of config.json that say nothing of the weights' shapes or of what is computed with them."""


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
        takes_directories: bool = False,
    ) -> None:
        """Args:
        model: Hugging Face directory; checkpoints of another architecture are refused. None takes the first one's.
        machine: its `device` and `threads` are used.
        scratch: an empty directory on a disk with room for two checkpoints.
        open_engine: None makes an engine in this process.
        takes_directories: the driver is on this machine and may name directories, which no file has to cross for.
        """
        self._open_engine = open_engine or (lambda config, temperature: TrainEngine(config, temperature=temperature))
        self._takes_directories = takes_directories
        self.architecture = None if model is None else _architecture(model)
        self.shelf = Shelf(scratch / "blobs", model)
        self._machine, self._scratch = machine, scratch
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
            "save_checkpoint": self._save_checkpoint,
            "load_directory": self._load_directory,
            "save_directory": self._save_directory,
        }
        try:
            return works[verb](body)
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
        if self._engine is not None:
            self._engine.close()
            self._engine = None

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
        asked = parse(OptimStep, body)
        return _json(asdict(self._held().optim_step(asked.learning_rate, asked.max_grad_norm, asked.role)))

    def _load_checkpoint(self, body: bytes) -> CallReply:
        asked, directory = parse(LoadCheckpoint, body), self._scratch / "loading"
        shutil.rmtree(directory, ignore_errors=True)
        model = self._laid_out(asked.files, directory / "model")
        state = None if asked.trainer_state is None else self._laid_out(asked.trainer_state, directory / "state")
        found, served = _architecture(model), self.architecture
        if served is not None and found != served and asked.role is not Role.CRITIC:
            key = min(key for key in found.keys() | served.keys() if found.get(key) != served.get(key))
            raise DataError(
                f"The checkpoint is of another architecture than the service: {key} is {found.get(key)!r}, the service's "
                f"{served.get(key)!r}. Start a service with that model."
            )
        cursor = self._held().load_checkpoint(model, trainer_state=state, role=asked.role)
        shutil.rmtree(directory)
        self.shelf.keep_only(None)
        return _json(cursor.model_dump())

    def _save_checkpoint(self, body: bytes) -> CallReply:
        asked, directory = parse(SavedCursor, body), self._scratch / "saving"
        shutil.rmtree(directory, ignore_errors=True)
        self._held().save_checkpoint(directory, asked.root)
        files = self.shelf.keep_only(directory)
        shutil.rmtree(directory)
        return _json(FileList(files=files).model_dump())

    def _load_directory(self, body: bytes) -> CallReply:
        asked = self._on_this_machine(parse(LoadDirectory, body))
        state = None if asked.trainer_state is None else Path(asked.trainer_state)
        cursor = self._held().load_checkpoint(Path(asked.directory), trainer_state=state, role=asked.role)
        return _json(cursor.model_dump())

    def _save_directory(self, body: bytes) -> CallReply:
        asked = self._on_this_machine(parse(SaveDirectory, body))
        self._held().save_checkpoint(Path(asked.directory), asked.cursor)
        return _json({})

    def _on_this_machine(self, asked: Asked) -> Asked:
        if not self._takes_directories:
            raise DataError("This train service takes checkpoints as files. Use load_checkpoint and save_checkpoint.")
        return asked

    def _laid_out(self, files: Sequence[TransferredFile], target: Path) -> Path:
        self.shelf.lay_out(files, target)
        return target

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


def _architecture(model: Path) -> dict[str, Any]:
    try:
        held = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} has no readable config.json: it is not a Hugging Face model directory.") from error
    return {key: value for key, value in held.items() if key not in _NO_ARCHITECTURE}


class Shelf:
    """Files in a directory of the server's own; `model` is read in place."""

    def __init__(self, directory: Path, model: Path | None = None) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        files = list_files(model) if model is not None else []
        self._model = {file.sha256: inside(model, file.path) for file in files if model is not None}

    def find(self, sha256: str) -> Path | None:
        """Path of the file, if it is here."""
        path = self._model.get(sha256) or self._path(sha256)
        return path if path.is_file() else None

    def missing(self, files: Iterable[TransferredFile]) -> list[str]:
        """Digests that are not here."""
        return sorted({file.sha256 for file in files if self.find(file.sha256) is None})

    async def receive(self, sha256: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """Take a file that arrives."""
        announced = TransferredFile(path=sha256, size=size, sha256=sha256)
        await write_checked_async(self._path(sha256), chunks, announced)

    def put(self, sha256: str, data: bytes) -> None:
        """Take a file that is here whole."""
        announced = TransferredFile(path=sha256, size=len(data), sha256=sha256)
        write_checked(self._path(sha256), [data], announced)

    def lay_out(self, files: Iterable[TransferredFile], target: Path) -> None:
        """Build a directory of these files; they are links where the disk allows it.

        Raises:
            DataError: a file is not here.
        """
        target.mkdir(parents=True)
        for file in files:
            held, placed = self.find(file.sha256), inside(target, file.path)
            if held is None:
                raise DataError(f"{file.path} ({file.sha256[:12]}) was not sent before load_checkpoint.")
            placed.parent.mkdir(parents=True, exist_ok=True)
            _link(held, placed)

    def keep_only(self, directory: Path | None) -> list[TransferredFile]:
        """Drop everything but the model and the files of this directory, which are taken in; return those."""
        files = list_files(directory) if directory is not None else []
        for file in files:
            assert directory is not None
            if self.find(file.sha256) is None:
                _link(directory / file.path, self._path(file.sha256))
        kept = {file.sha256 for file in files}
        for path in self._directory.iterdir():
            if path.name not in kept:
                path.unlink()
        return files

    def _path(self, sha256: str) -> Path:
        if len(sha256) != 64 or not sha256.isalnum() or not sha256.isascii():
            raise DataError(f"{sha256[:80]!r} is no SHA-256 digest.")
        return self._directory / sha256


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
