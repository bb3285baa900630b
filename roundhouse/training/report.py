"""What a training step tells: numbers, seconds, and one row a sequence.

Invariant: every metric of a report is explained in `metrics.METRICS`, and every received sequence has one row, trained or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from roundhouse.training.algorithm import Stamp
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.metrics import METRICS, Denominator


@dataclass(frozen=True, slots=True)
class StepReport:
    """One iteration's training."""

    iteration: int
    updates: int
    """Optimizer steps done; 0 when no group had spread, and the weights are what they were."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """Wall time: forward_old, forward_reference (0 when not needed), updates, total."""
    tokens: dict[str, int]
    """received, generated (on the loss mask), trained (with a non-zero weight)."""
    columns: pa.Table
    """One row a sequence; see `sequence_rows`."""

    @property
    def denominators(self) -> dict[str, Denominator]:
        """What each metric is a mean over."""
        return {name: METRICS[name].denominator for name in self.metrics}


def sequence_rows(
    sequences: TrainingSequences, stamp: Stamp, measured: np.ndarray, old_log_probs: np.ndarray
) -> pa.Table:
    """One row a sequence: ids, reward, the algorithm's columns, and the trainer's log-probabilities.

    `measured` [T] marks the tokens whose log-probability the trainer computed. `trainer_logprobs` is null for a sequence
    without any, else one value a token, null where it was not computed, from before the first update.
    """
    first = sequences.offsets[:-1]
    trained = np.add.reduceat(stamp.columns.trained.astype(np.int64), first)
    counts = np.add.reduceat(measured.astype(np.int64), first)
    error = np.where(measured, np.exp(np.abs(old_log_probs - sequences.gen_logprobs), dtype=np.float64), 0)
    errors = np.add.reduceat(error, first) / np.maximum(counts, 1)
    unmeasured = counts == 0
    log_probs = pa.ListArray.from_arrays(
        pa.array(sequences.offsets, pa.int32()),
        pa.array(old_log_probs, pa.float32(), mask=~measured),
        mask=pa.array(unmeasured),
    )
    return pa.table(
        {
            "sequence_id": sequences.sequence_ids,
            "rollout_id": sequences.rollout_ids,
            "group_id": sequences.group_ids,
            "reward": sequences.rewards,
            **stamp.sequence_columns,
            "trained": trained > 0,
            "tokens": sequences.lengths,
            "trained_tokens": trained,
            "token_mult_prob_error": pa.array(errors, mask=unmeasured),
            "trainer_logprobs": log_probs,
        }
    )
