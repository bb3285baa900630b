"""Age of data relative to the policy that learns from it, and its bounds.

Invariant: this module decides nothing by itself. `judge` compares measurements with the bounds of `offline`; each of
its lines has the number, the bound's key and its value.

    w      importance weight of a token, exp(policy − recorded log-probability); of a rollout, the product over its tokens
    Kish   (Σw)² / (n Σw²): the effective share of n samples; 1 when all weights are equal
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from roundhouse.config.models import RunConfig
from roundhouse.config.rollout import OfflineConfig
from roundhouse.errors import DataError
from roundhouse.trajectories.schemas import computed_log_probs

log = logging.getLogger(__name__)

STOPPED = (
    "The versions before are published. Collect again with the newest of them and train on that, lower "
    "train.optimizer.learning_rate or offline.epochs, lower the bound, or set offline.on_stale=warn."
)
REMEDY = (
    "Collect again with the policy that training starts from (roundhouse collect, a schedule), start from the collecting "
    "policy (--at), raise the bound, or set offline.on_stale=warn."
)


class StaleData(DataError):
    """The policy has moved away from the data that it was to learn from."""


@dataclass(frozen=True, slots=True)
class Importance:
    """Statistics of a sample's importance weights."""

    tokens: int
    rollouts: int
    effective_tokens: float
    """Kish, as a share of the tokens."""
    effective_rollouts: float
    """Kish of the rollouts' weights, as a share of the rollouts."""
    clipped: float
    """Share of the tokens with a weight outside of the correction's bounds."""
    mean_difference: float
    """Mean of |policy − recorded| over the tokens, in nats."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """One dataset version, seen from the policy that training starts from."""

    label: str
    policy_version: int
    """Version that collected the data."""
    age: int | None
    """Number of later policy versions; None if lineage does not connect the two."""
    days: float
    importance: Importance | None
    """None without a sample."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def importance_of(difference: np.ndarray, rollout: np.ndarray, bounds: tuple[float, float]) -> Importance:
    """
    Args:
        difference: [M] policy − recorded log-probability of each token.
        rollout: [M] a number for the rollout of each token, any numbers.
        bounds: of the correction (`train.algorithm.mismatch_bounds`).
    """
    difference = difference.astype(np.float64)
    owner = np.unique(rollout, return_inverse=True)[1]
    totals = np.bincount(owner, difference)
    with np.errstate(over="ignore"):
        weights = np.exp(difference)
    outside = (weights < bounds[0]) | (weights > bounds[1])
    return Importance(
        tokens=len(difference),
        rollouts=len(totals),
        effective_tokens=kish(difference),
        effective_rollouts=kish(totals),
        clipped=float(outside.mean()),
        mean_difference=float(np.abs(difference).mean()),
    )


def kish(log_weights: np.ndarray) -> float:
    """(Σw)² / (n Σw²) of the weights with these logarithms; in (0, 1]."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def judge(config: RunConfig, found: Freshness) -> list[str]:
    """Return one line per exceeded bound of a dataset version; empty if it is fresh enough.

    Cross-entropy does not weight tokens, so only the ages count for it.
    """
    bounds = _bounds(config)
    lines = []
    if found.age is not None and bounds.max_age is not None and found.age > bounds.max_age:
        lines.append(
            f"it was collected {found.age} policy versions before the start of training (offline.max_age={bounds.max_age})"
        )
    if bounds.max_age_days is not None and found.days > bounds.max_age_days:
        lines.append(f"it was collected {found.days:.1f} days ago (offline.max_age_days={bounds.max_age_days:g})")
    if found.importance is not None:
        lines += judge_importance(config, found.importance)
    return lines


def judge_importance(config: RunConfig, found: Importance) -> list[str]:
    """The same of the importance weights alone."""
    bounds = _bounds(config)
    if (correction := config.train.algorithm.bounds) is None:
        return []
    lines = []
    for what, share, count, key in (
        ("tokens", found.effective_tokens, found.tokens, "min_ess_fraction"),
        ("rollouts", found.effective_rollouts, found.rollouts, "min_rollout_ess_fraction"),
    ):
        if share < (least := getattr(bounds, key)):
            lines.append(
                f"its {count} {what} are worth {share * count:.0f} of the policy's own, an effective sample of {share:.3f} "
                f"(offline.{key}={least:g})"
            )
    if found.clipped > bounds.max_clipped_fraction:
        low, high = correction
        lines.append(
            f"{found.clipped:.1%} of the importance weights lie outside of {low:g} to {high:g} "
            f"(offline.max_clipped_fraction={bounds.max_clipped_fraction:g})"
        )
    return lines


def settle(config: RunConfig, what: str, lines: list[str], remedy: str = REMEDY) -> None:
    """Warn about stale data or refuse it, as set by `offline.on_stale`.

    Raises:
        StaleData: there are lines, and the setting is refuse.
    """
    if not lines:
        return
    message = f"{what} is too old to train on: {'; '.join(lines)}. {remedy}"
    if _bounds(config).on_stale == "refuse":
        raise StaleData(message)
    log.warning("%s", message)


def drift(config: RunConfig, sequences: pa.Table, columns: pa.Table) -> Importance | None:
    """Return the importance weights of an iteration's trained tokens under its initial weights; None without tokens.

    Args:
        sequences: of the validate stage.
        columns: of the train stage, one row a sequence in the same order.
    """
    computed = columns.column("trainer_logprobs").combine_chunks()
    recorded = sequences.column("gen_logprobs").combine_chunks()
    rollouts = np.unique(sequences.column("rollout_id").to_numpy(zero_copy_only=False), return_inverse=True)[1]
    differences, owners = [], []
    for index in range(columns.num_rows):
        if not computed[index].is_valid:
            continue
        policy, on = computed_log_probs(computed[index])
        differences.append((policy - recorded[index].values.to_numpy())[on])
        owners.append(np.full(int(on.sum()), rollouts[index]))
    if not differences or not sum(map(len, differences)):
        return None
    return importance_of(np.concatenate(differences), np.concatenate(owners), bounds_of(config))


def bounds_of(config: RunConfig) -> tuple[float, float]:
    """Return the correction's bounds; without a correction, the default ones."""
    return config.train.algorithm.bounds or (0.5, 5.0)


def importance_metrics(found: Importance | None) -> dict[str, float]:
    """`offline/…` of an iteration or a sample."""
    if found is None:
        return {}
    return {
        "offline/effective_tokens": found.effective_tokens,
        "offline/effective_rollouts": found.effective_rollouts,
        "offline/clipped": found.clipped,
        "offline/logprob_difference": found.mean_difference,
    }


def _bounds(config: RunConfig) -> OfflineConfig:
    assert config.offline is not None, "only an offline run has data that can be stale"
    return config.offline


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
