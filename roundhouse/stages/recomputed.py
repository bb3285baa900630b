"""The proof of log-probabilities: the weights that the iteration was collected with say what the engine recorded.

Invariant: what weights have learnt from was generated, as recorded, by the version before. The train stage computes these
log-probabilities anyway, for every token that it trains on, before the first update; so the proof covers all of them, costs no
pass over the model, and works over every train service. A sequence that the weights do not bear out has weight 0 in every term
of the loss (`mismatch.borne_out`) and stands in the dataset `mismatched`; above a share of them the weights become no version.

It catches what no single row shows: log-probabilities that were swapped, shifted or made up, answers of other weights under
the wanted version's number, and tokens that were changed where no later prompt repeats them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from roundhouse.config.models import RunConfig, ValidationConfig
from roundhouse.errors import DataError
from roundhouse.trajectories.sequences import FEWEST_TOKENS, computed_log_probs

MISMATCHED = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("tokens", pa.int32()),  # that were compared
        ("mean_difference", pa.float64()),  # of the absolute difference, nats a token
        ("largest_difference", pa.float64()),
        ("largest_at", pa.int32()),  # position in the sequence
    ]
)
"""One row a sequence that the weights do not bear out."""


def mismatched(sequences: pa.Table, columns: pa.Table, *, policy_version: int, tolerance: float) -> pa.Table:
    """The sequences whose recorded log-probabilities are not those of the weights.

    Args:
        sequences: the validate stage's dataset.
        columns: the train stage's, one row a sequence in the same order.
        policy_version: of the weights that `trainer_logprobs` were computed with; sequences of other versions are not judged.
        tolerance: nats.
    """
    trainer = columns.column("trainer_logprobs").combine_chunks()
    recorded = sequences.column("gen_logprobs").combine_chunks()
    rows = []
    for index in np.flatnonzero(sequences.column("policy_version").to_numpy() == policy_version).tolist():
        if not trainer[index].is_valid:
            continue
        old, computed = computed_log_probs(trainer[index])
        difference = np.where(computed, np.abs(old - recorded[index].values.to_numpy()), 0).astype(np.float64)
        count = int(computed.sum())
        # A comparison that NaN fails.
        if not difference.sum() <= tolerance * max(count, FEWEST_TOKENS):
            rows.append(
                {
                    **{
                        name: sequences.column(name)[index].as_py()
                        for name in ("sequence_id", "rollout_id", "group_id")
                    },
                    "tokens": count,
                    "mean_difference": float(difference.sum() / count),
                    "largest_difference": float(difference.max()),
                    "largest_at": int(difference.argmax()),
                }
            )
    return pa.Table.from_pylist(rows, schema=MISMATCHED)


def tolerance_of(config: RunConfig) -> float | None:
    """`validation.recompute_tolerance`, or None where engine and trainer compute different distributions by design, and where
    the rollouts are another run's, whose version numbers say nothing of these weights."""
    sampling = config.generation.sampling
    if config.offline is not None or sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k is not None:
        return None
    return config.validation.recompute_tolerance


def refuse_mismatched(found: pa.Table, judged: int, config: ValidationConfig, where: str) -> None:
    """
    Raises:
        DataError: they are more than `validation.max_mismatched_fraction` of the sequences that were judged.
    """
    if found.num_rows <= config.max_mismatched_fraction * judged:
        return
    worst = max(found.to_pylist(), key=lambda row: row["mean_difference"])
    raise DataError(
        f"{found.num_rows} of {judged} sequences have log-probabilities that the recorded weights do not give; the worst is "
        f"{worst['sequence_id']} with a mean difference of {worst['mean_difference']:.3g} nats "
        f"(validation.recompute_tolerance={config.recompute_tolerance:g}). So many "
        f"(validation.max_mismatched_fraction={config.max_mismatched_fraction:g}) make no version. If all differ, the engine "
        " holds other weights or computes them otherwise: look at train/logprob_abs_diff_mean of earlier iterations and "
        f"at the refit; if few do, their rows are damaged. The evidence is in {where} (dataset mismatched)."
    )
