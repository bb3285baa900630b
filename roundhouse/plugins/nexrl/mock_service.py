"""NexRL's train service `mock`, for a loop of your own: the verbs of a train service, with made-up results.

Invariant: no weights exist, so nothing is learnt: log-probabilities are those of the engine's records, or 0, and every
gradient has norm 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from roundhouse.errors import ConfigError
from roundhouse.store.location import Location
from roundhouse.store.stage import ModelFiles
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.service.verbs import Applied, Gradient, LossBatch, ModelFacts, Role, TokenBatch, ValueBatch

LARGEST_TOKEN = 2**31


class MockTrainServiceClient:
    """A train service that only counts its optimizer steps."""

    def __init__(self) -> None:
        self.steps = 0

    def facts(self) -> ModelFacts:
        """Return facts that every sequence fits."""
        return ModelFacts(vocabulary=LARGEST_TOKEN, positions=None, reproducible=True)

    def forward(self, batch: TokenBatch, role: Role = Role.POLICY) -> np.ndarray:
        """Return [T] zeros."""
        return np.zeros(len(batch.token_ids), dtype=np.float32)

    def forward_backward(self, batch: LossBatch) -> Gradient:
        """Return a loss of 0 and the recorded log-probabilities."""
        tokens = len(batch.tokens.token_ids)
        log_probs = np.asarray(batch.gen_logprobs, dtype=np.float32)
        return Gradient(0.0, 0.0, log_probs, shares={}, microbatches=1, real_tokens=tokens, positions=tokens)

    def value_backward(self, batch: ValueBatch) -> Gradient:
        """Return a loss of 0 and values of 0."""
        tokens = len(batch.tokens.token_ids)
        values = np.zeros(tokens, dtype=np.float32)
        return Gradient(0.0, 0.0, values, shares={}, microbatches=1, real_tokens=tokens, positions=tokens)

    def optim_step(self, learning_rate: float, max_grad_norm: float, role: Role = Role.POLICY) -> Applied:
        """Count a step."""
        self.steps += role is Role.POLICY
        return Applied(grad_norm=0.0)

    def save_checkpoint(self, directory: Path, cursor: Cursor | None) -> None:
        """Write the number of steps into `mock.json`, and the cursor under `trainer/`."""
        (directory / "mock.json").write_text(json.dumps({"steps": self.steps}))
        if cursor is not None:
            (directory / "trainer").mkdir(exist_ok=True)
            (directory / "trainer" / "cursor.json").write_text(cursor.model_dump_json())

    def store_checkpoint(
        self, place: Location, attempt: str, cursor: Cursor | None, *, weights: bool = True
    ) -> ModelFiles:
        """
        Raises:
            ConfigError: a run needs weights.
        """
        raise ConfigError("The train service mock has no weights for a run: choose train.service.kind.")

    def load_checkpoint(self, directory: Any, *, trainer_state: Any | None = None, role: Role = Role.POLICY) -> Cursor:
        """Return the cursor that `save_checkpoint` wrote, or a new one."""
        if trainer_state is None:
            return Cursor()
        self.steps = int(json.loads((Path(directory) / "mock.json").read_text())["steps"])
        return Cursor.model_validate_json((Path(trainer_state) / "cursor.json").read_text())

    def close(self) -> None:
        """Do nothing."""
