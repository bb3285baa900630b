"""The verbs of a train service, and their data.

Invariant: a request contains everything its answer depends on, apart from the weights, as flat arrays and JSON values:
no tensor, no module, nothing that needs pickle. The same driver therefore trains in its own process, a Ray actor, a
separate process or over a network, with equal bits on one machine.

    load_checkpoint ─> ( forward* ─> ( forward_backward+ ─> optim_step )* ─> store_checkpoint )*

Checkpoints are not part of a request: the holder of the weights reads and writes the store, and returns names and
digests. With a critic, `value_backward` is its `forward_backward`.

Gradients add up over the calls of `forward_backward` until `optim_step` applies them. The driver computes each token's
`scale` from the counts of the whole update, so the cut into calls, microbatches or ranks does not matter.

Notation: S sequences with T tokens in all, held flat; sequence s owns `offsets[s]:offsets[s + 1]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roundhouse.errors import DataError
from roundhouse.store.directories import ModelSource
from roundhouse.store.location import Location
from roundhouse.store.stage import ModelFiles
from roundhouse.training.algorithms import LossSettings, TokenColumns
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.checkpoint import Cursor
from roundhouse.training.loss import Share

if TYPE_CHECKING:
    from roundhouse.store.run import Run


class Role(StrEnum):
    """Role of one of the service's models."""

    POLICY = "policy"
    """The trained model."""
    REFERENCE = "reference"
    """The frozen one of the KL term."""
    CRITIC = "critic"
    """The model that learns to predict the future reward."""

    @property
    def learns(self) -> bool:
        """Return whether it has an optimizer; the optimizer's state is saved."""
        return self is not Role.REFERENCE


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """Arguments of a train service beside the section `train`. A plug-in's factory is called with that section and this."""

    owner: str
    """Owner of the training session; a service that several runs share distinguishes them by it."""
    temperature: float = 1.0
    placement_group: str | None = None
    """Ray ID of the group that holds the trainer in its last bundle."""
    run_and_iteration: tuple[Run, int] | None = None
    """For trainers that a launcher starts."""
    apart: bool = False
    """Train in another process than this one."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences, and which of their tokens are predicted. Each sequence has at least one such token, never its first."""

    offsets: np.ndarray
    """[S + 1] int64."""
    token_ids: np.ndarray
    """[T] int32."""
    predicted: np.ndarray
    """[T] bool: the tokens with a requested log-probability or preceding value."""
    images: tuple[tuple[bytes, ...], ...] | None = None
    """[S]: image files of the sequences; None without any. They are trained in this process alone."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, sequences: TrainingSequences, indices: list[int], predicted: np.ndarray) -> TokenBatch:
        """The sequences with these indices, in this order; `predicted` [T] is over all of `sequences`."""
        chosen = token_positions(sequences, indices)
        lengths = sequences.lengths[indices]
        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            token_ids=sequences.token_ids[chosen],
            predicted=predicted[chosen],
            images=tuple(sequences.images[index] for index in indices) if sequences.images else None,
        )


@dataclass(frozen=True, slots=True)
class LossBatch:
    """An update, or a part of one: sequences with all that the token loss needs. Arrays are [T] float32."""

    tokens: TokenBatch
    columns: TokenColumns
    gen_logprobs: np.ndarray
    """The engine's, from when the token was sampled."""
    scale: np.ndarray
    """Factor that makes the update's sum of token losses a mean (`loss.sequence_scale`)."""
    loss: LossSettings
    old_logprobs: np.ndarray | None = None
    """The trainer's before the first update. None: those of this very forward pass, which saves one."""
    ref_logprobs: np.ndarray | None = None
    """The reference's; None without a KL term."""
    tolerance: np.ndarray | None = None
    """Allowed difference between recorded and old log-probabilities of the token's sequence (`loss.borne_out`), 0 for
    any; a sequence beyond it has weight 0. None: any."""


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """An update of the critic, or a part of one. Arrays are [T] float32."""

    tokens: TokenBatch
    old_values: np.ndarray
    """The critic's before its first update."""
    returns: np.ndarray
    """Targets of the critic."""
    scale: np.ndarray
    """As in `LossBatch`."""
    clip: float | None
    """`loss.value_loss`."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Report of `forward_backward` or `value_backward` about the gradient that it added."""

    loss: float
    policy_loss: float
    """0 of the critic."""
    log_probs: np.ndarray
    """[T] float32: log-probabilities under the present weights, or the critic's values; 0 if not predicted."""
    shares: dict[str, Share]
    """Sums of the token metrics, by the names of `metrics.METRICS`."""
    microbatches: int
    real_tokens: int
    positions: int
    """Forward and backward passes, the tokens in them, and those with padding."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of `optim_step`."""

    grad_norm: float | None
    """Before clipping. When it is not finite the step was not applied. None: the service does not report it."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the policy with which a driver refuses unfit sequences."""

    vocabulary: int
    """Token ids stay below it."""
    positions: int | None
    """Longest sequence; None when the model sets no limit."""
    reproducible: bool = False
    """Whether the same verbs on the same weights give the same bits: true on CPUs, false with GPU kernels."""


class TrainService(Protocol):
    """Weights and an optimizer, somewhere.

    Every verb raises `InfraError` when the service cannot be reached or lost its state: whether it did its work is then
    unknown, and the caller begins again from a checkpoint. `DataError` means that the request itself was refused.
    """

    def facts(self) -> ModelFacts:
        """Return the facts of the loaded policy."""
        ...

    def forward(self, batch: TokenBatch, role: Role = Role.POLICY) -> np.ndarray:
        """[T] float32 log-probabilities of the predicted tokens, or the critic's values before them, 0 elsewhere."""
        ...

    def forward_backward(self, batch: LossBatch) -> Gradient:
        """Add the batch's gradient. When the loss is not finite, every gradient added so far is dropped."""
        ...

    def value_backward(self, batch: ValueBatch) -> Gradient:
        """Add the batch's gradient to the critic's; otherwise as `forward_backward`."""
        ...

    def optim_step(self, learning_rate: float, max_grad_norm: float, role: Role = Role.POLICY) -> Applied:
        """Clip a model's gradient to the norm and apply it; drop it if its norm is not finite.

        Raises:
            DataError: no gradient was computed.
        """
        ...

    def store_checkpoint(
        self, place: Location, attempt: str, cursor: Cursor | None, *, weights: bool = True
    ) -> ModelFiles:
        """Write the files of `save_checkpoint` to the store, from the holder of the weights, hashed in passing.

        Args:
            attempt: name of the files' directory in the checkpoint `place`, such as `0002`.
            weights: False omits all but `trainer/`. Other threads may run verbs that change nothing at the same time.

        Returns:
            The files, which no manifest names yet.
        """
        ...

    def save_checkpoint(self, directory: Path, cursor: Cursor | None) -> None:
        """Write the Hugging Face directory, and optimizer, cursor and critic under `trainer/`, into a directory that caller and
        service both see.

        Args:
            cursor: None writes the weights alone.
        """
        ...

    def load_checkpoint(
        self, directory: ModelSource, *, trainer_state: ModelSource | None = None, role: Role = Role.POLICY
    ) -> Cursor:
        """Load weights, and the optimizer's state and the cursor from `trainer_state`; None starts both anew.

        A critic without `trainer_state` is this model with a new head; the state of a saved one is in
        `trainer/critic/`, a directory of the same form. Its cursor is the policy's.

        The directories may be deleted once this returns. Gradients are dropped.

        Raises:
            ConfigError: a directory is missing, or not visible to the service; or the model does not work with the
                configuration.
            DataError: files are damaged, or of another architecture than the model that they replace.
            StoreError: a file of the store is missing or damaged.
        """
        ...

    def close(self) -> None:
        """Release the service's resources for this caller. Closing twice is allowed."""
        ...


def token_positions(sequences: TrainingSequences, indices: list[int]) -> np.ndarray:
    """Positions of the tokens of these sequences in the token arrays, one sequence after the other."""
    starts, lengths = sequences.offsets[indices], sequences.lengths[indices]
    begins = np.cumsum(lengths) - lengths
    return np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))


def check_fits(facts: ModelFacts, sequences: TrainingSequences) -> None:
    """Refuse sequences that the model cannot take.

    Raises:
        DataError: a token id is outside the vocabulary, or a sequence is longer than the model's positions.
    """
    highest = int(sequences.token_ids.max())
    if highest >= facts.vocabulary:
        owner = sequences.sequence_ids[sequences.sequence_of_token[int(sequences.token_ids.argmax())]]
        raise DataError(
            f"sequence {owner!r} has token id {highest}, but the model's vocabulary ends at {facts.vocabulary - 1}: the "
            "sequences were generated by another model."
        )
    longest = int(sequences.lengths.max())
    if facts.positions is not None and longest > facts.positions:
        owner = sequences.sequence_ids[int(sequences.lengths.argmax())]
        raise DataError(
            f"sequence {owner!r} has {longest} tokens, but the model has {facts.positions} positions. Lower "
            "rollout.max_tokens."
        )
