"""The critic's part of a training step: its values before the first update, and its updates.

Invariant: the critic's results depend only on its weights and moments before the step, the sequences, the algorithm's
returns, and the order of the updates. Policy and critic influence each other only through the advantages, so the
critic's updates may follow the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundhouse.config.algorithms import CriticConfig
from roundhouse.errors import DataError
from roundhouse.store.directories import ModelSource
from roundhouse.training.algorithms.ppo import last_generated
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import CRITIC_DIRECTORY, TRAINER_DIRECTORY, Cursor
from roundhouse.training.service.verbs import Gradient, Role, TokenBatch, TrainService, ValueBatch, token_positions


def load_critic(service: TrainService, cursor: Cursor, start: ModelSource, trainer_state: ModelSource | None) -> None:
    """Load the critic of `trainer_state` into the service, or a new one on the model in `start`.

    Raises:
        DataError: the cursor counts a critic's updates, but the state does not contain a critic.
    """
    saved = None if trainer_state is None else trainer_state / CRITIC_DIRECTORY
    if saved is not None and saved.is_dir():
        service.load_checkpoint(saved, trainer_state=saved / TRAINER_DIRECTORY, role=Role.CRITIC)
    elif cursor.critic_iterations:
        raise DataError(
            f"{saved} is not there, but the critic has learnt from {cursor.critic_iterations} iterations. Resume from an older "
            "checkpoint."
        )
    else:
        service.load_checkpoint(start, role=Role.CRITIC)


@dataclass(frozen=True, slots=True)
class CriticStep:
    """A critic in one iteration."""

    service: TrainService
    config: CriticConfig
    sequences: TrainingSequences
    values: np.ndarray
    """[T] float32: its prediction before each generated token, before its updates."""
    final_values: np.ndarray
    """[S] float32: prediction after the last generated token of a truncated sequence; 0 for the others."""

    @classmethod
    def begin(cls, service: TrainService, config: CriticConfig, sequences: TrainingSequences) -> CriticStep:
        """Ask the critic for its values."""
        batch = with_ends(sequences)
        log_probs = service.forward(batch, Role.CRITIC)
        lasts = last_generated(sequences) - sequences.offsets[:-1]
        values = np.zeros(len(sequences.token_ids), dtype=np.float32)
        final = np.zeros(len(sequences), dtype=np.float32)
        for s, (start, last) in enumerate(zip(batch.offsets[:-1].tolist(), lasts.tolist(), strict=True)):
            first = int(sequences.offsets[s])
            values[first : first + last + 1] = log_probs[start : start + last + 1]
            if sequences.truncated[s]:
                final[s] = log_probs[start + last + 1]
        return cls(service, config, sequences, values, final)

    def backward(self, indices: list[int], trained: np.ndarray, returns: np.ndarray, scale: np.ndarray) -> Gradient:
        """The gradient of one update, on the sequences with these indices.

        Args:
            trained: [T] bool over all sequences, as `returns` ([T]) is.
            scale: of each token of these sequences.
        """
        chosen = token_positions(self.sequences, indices)
        return self.service.value_backward(
            ValueBatch(
                tokens=TokenBatch.of(self.sequences, indices, trained),
                old_values=self.values[chosen],
                returns=returns[chosen],
                scale=scale,
                clip=self.config.value_clip,
            )
        )

    def metrics(self, trained: np.ndarray, returns: np.ndarray) -> dict[str, float]:
        """Return metrics of its values before the updates, without explained variance if all returns are equal."""
        if not trained.any():
            return {}
        values, targets = self.values[trained].astype(np.float64), returns[trained].astype(np.float64)
        result = {"value_mean": float(values.mean())}
        if (spread := float(targets.var())) > 0:
            result["explained_variance"] = 1 - float((targets - values).var()) / spread
        return result


def with_ends(sequences: TrainingSequences) -> TokenBatch:
    """Return each sequence up to its last generated token, and for a truncated one an extra token that requests the
    value there.

    Any token will do, because a sequence's last token is not read.
    """
    offsets, token_ids, predicted = [0], [], []
    for s, last in enumerate(last_generated(sequences).tolist()):
        own = slice(int(sequences.offsets[s]), last + 1)
        end = int(sequences.truncated[s])
        token_ids += [sequences.token_ids[own], np.zeros(end, dtype=np.int32)]
        predicted += [sequences.loss_mask[own], np.ones(end, dtype=bool)]
        offsets.append(offsets[-1] + own.stop - own.start + end)
    return TokenBatch(np.array(offsets, dtype=np.int64), np.concatenate(token_ids), np.concatenate(predicted))
