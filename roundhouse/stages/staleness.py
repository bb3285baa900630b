"""Metrics by age: what was stale, by how much, and what it did to the log-probabilities.

Invariant: every number is about tokens whose log-probability the trainer computed, each with the version of the span that it
lies in; a token of no span has its sequence's oldest version. Nothing here needs the model: it is computed from the datasets
`sequences` and `columns`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from roundhouse.errors import DataError
from roundhouse.trajectories.sequences import computed_log_probs


def staleness_metrics(sequences: pa.Table, columns: pa.Table, trained_version: int) -> dict[str, float]:
    """`staleness/…` of one step that began from `trained_version`.

    Args:
        sequences: of the validate stage.
        columns: of the train stage, with `trainer_logprobs` (before the step), one row a sequence in the same order.

    Returns:
        staleness/age_mean, age_max                       in versions
        staleness/sequences_mixed                         share of sequences with more than one version
        staleness/share/age_<a>                           share of the trained tokens
        staleness/logprob_abs_diff/age_<a>                mean |old - gen|
        staleness/importance_ratio/age_<a>                mean exp(old - gen): 1 for samples of the same policy
        staleness/ess/age_<a>                             (sum w)² / (n sum w²) of the ratios w: share that still counts

    Raises:
        DataError: the tables are not of one step, or a token is newer than the weights that train on it.
    """
    if columns.num_rows != sequences.num_rows:
        raise DataError(f"{columns.num_rows} rows of columns for {sequences.num_rows} sequences: not of one step.")
    if sequences.num_rows == 0:
        return {}
    ages, difference, mixed = _measured(sequences, columns, trained_version)
    if not len(ages):
        return {}
    if ages.min() < 0:
        raise DataError(
            f"A token of version {trained_version - int(ages.min())} is trained on from version {trained_version}."
        )
    metrics = {
        "staleness/age_mean": float(ages.mean()),
        "staleness/age_max": float(ages.max()),
        "staleness/sequences_mixed": mixed,
    }
    for age in np.unique(ages).tolist():
        own = difference[ages == age]
        ratio = np.exp(own)
        metrics |= {
            f"staleness/share/age_{age}": len(own) / len(ages),
            f"staleness/logprob_abs_diff/age_{age}": float(np.abs(own).mean()),
            f"staleness/importance_ratio/age_{age}": float(ratio.mean()),
            f"staleness/ess/age_{age}": float(ratio.sum() ** 2 / (len(own) * (ratio**2).sum())),
        }
    return metrics


def _measured(sequences: pa.Table, columns: pa.Table, trained_version: int) -> tuple[np.ndarray, np.ndarray, float]:
    """[M] age and old - gen of each token that the trainer computed, and the share of sequences with several versions."""
    names = ["policy_version", "version_spans", "loss_mask", "gen_logprobs"]
    ages, differences, mixed = [], [], 0
    computed = columns.column("trainer_logprobs").combine_chunks()
    for row, trainer in zip(sequences.select(names).to_pylist(), computed, strict=True):
        spans = row["version_spans"] or []
        mixed += len({span["version"] for span in spans}) > 1
        if not trainer.is_valid:
            continue  # nothing of it was trained on
        old, counted = computed_log_probs(trainer)
        if len(old) != len(row["loss_mask"]):
            raise DataError(
                f"{len(old)} trainer log-probabilities for {len(row['loss_mask'])} tokens: not of one step."
            )
        versions = np.full(len(old), row["policy_version"])
        for span in spans:
            versions[span["start"] : span["end"]] = span["version"]
        ages.append((trained_version - versions)[counted])
        differences.append((old.astype(np.float64) - np.asarray(row["gen_logprobs"]))[counted])
    none: list[np.ndarray] = [np.zeros(0)]
    return np.concatenate(ages or none), np.concatenate(differences or none), mixed / sequences.num_rows
