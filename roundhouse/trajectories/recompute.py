"""What the train stage computed of the recorded tokens: log-probabilities under the weights that the step began from.

Invariant: whether a token was computed is told by a null, never by a value: a policy that is certain of a token gives it a
log-probability of exactly 0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

FEWEST_TOKENS = 16
"""Where a sequence is judged by its mean difference, a shorter one counts as this long: one unlikely token, where rounding
shows most, is no evidence."""


def computed_log_probs(row: pa.ListScalar) -> tuple[np.ndarray, np.ndarray]:
    """A valid row of the column `trainer_logprobs`: [n] float32, 0 where not computed, and [n] bool, where it was.

    Stores of before hold 0 in place of null. They are told by the first token, which nothing predicts: it is null in all
    others.
    """
    values = row.values
    if values.null_count:
        return values.fill_null(0).to_numpy(), values.is_valid().to_numpy(zero_copy_only=False)
    old = values.to_numpy()
    return old, old != 0


def tolerances(versions: np.ndarray, policy_version: int, tolerance: float | None) -> np.ndarray | None:
    """[S] float32: how far recorded and recomputed log-probabilities of each sequence may be apart, 0 where that is not judged
    because another version generated it; None where nothing is."""
    return None if tolerance is None else np.where(versions == policy_version, tolerance, 0).astype(np.float32)
