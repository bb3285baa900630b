"""The verbs through a channel to a served engine: what a network client and a Ray handle have in common.

Invariant: bodies are those of `protocol` and `wire`, and a file is sent only when the other side lacks its bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np

from roundhouse.errors import ConfigError, InfraError
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.service import protocol
from roundhouse.training.service.files import TransferredFile, inside, list_files
from roundhouse.training.service.verbs import Applied, Gradient, LossBatch, ModelFacts, Role, TokenBatch
from roundhouse.training.service.wire import pack, unpack


class Channel(Protocol):
    """The way to a served engine. Everything raises `InfraError` when the other side is lost."""

    def ask(self, verb: str, body: bytes) -> bytes:
        """One of `protocol.READING`."""
        ...

    def change(self, verb: str, body: bytes) -> bytes:
        """One of `protocol.CHANGING`, done exactly once when this returns."""
        ...

    def missing(self, files: list[TransferredFile]) -> list[str]:
        """Digests that the other side lacks."""
        ...

    def send(self, file: TransferredFile, source: Path) -> None:
        """Give the other side a file's bytes."""
        ...

    def fetch(self, file: TransferredFile, target: Path) -> None:
        """Write a file of the other side here."""
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

    def optim_step(self, learning_rate: float, max_grad_norm: float) -> Applied:
        asked = protocol.OptimStep(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
        return Applied(**json.loads(self.channel.change("optim_step", asked.model_dump_json().encode())))

    def load_checkpoint(
        self, directory: Path, *, trainer_state: Path | None = None, role: Role = Role.POLICY
    ) -> Cursor:
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} has no config.json: it is not a Hugging Face model directory.")
        model = [file for file in list_files(directory) if "/" not in file.path]
        state = None if trainer_state is None else list_files(trainer_state)
        self._send(model, directory)
        if state is not None and trainer_state is not None:
            self._send(state, trainer_state)
        asked = protocol.LoadCheckpoint(role=role, files=model, trainer_state=state)
        self._facts = None
        return Cursor.model_validate_json(self.channel.change("load_checkpoint", asked.model_dump_json().encode()))

    def save_checkpoint(self, directory: Path, cursor: Cursor) -> None:
        listed = self.channel.change("save_checkpoint", cursor.model_dump_json().encode())
        for file in protocol.FileList.model_validate_json(listed).files:
            self.channel.fetch(file, inside(directory, file.path))

    def close(self) -> None:
        self.channel.close()

    def _send(self, files: list[TransferredFile], directory: Path) -> None:
        missing = set(self.channel.missing(files))
        for file in files:
            if file.sha256 in missing:
                self.channel.send(file, inside(directory, file.path))
                missing.remove(file.sha256)


def _require_length(log_probs: np.ndarray, batch: TokenBatch) -> None:
    if len(log_probs) != len(batch.token_ids):
        raise InfraError(
            f"The train service answered {len(log_probs)} log-probabilities for {len(batch.token_ids)} tokens."
        )
