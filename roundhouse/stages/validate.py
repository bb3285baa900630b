"""Validate: from rollouts to training sequences and a quarantine (`roundhouse.trajectories.validation`)."""

from __future__ import annotations

from roundhouse.errors import DataError
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.trajectories.validation import validate


def validate_iteration(run: Run, iteration: int, rollouts: Reference, vocabulary_size: int) -> Reference:
    """Validate the rollouts of an iteration.

    Raises:
        DataError: more was refused than `validation.max_quarantine_fraction` allows, or nothing is left to train on.
    """
    config = run.config
    stage = run.stage(iteration, "validate")
    if (done := stage.reference()) is not None:
        return done
    attempt = run.begin(stage, policy_version=rollouts.policy_version)
    result = validate(
        read_rollouts(rollouts),
        config.validation,
        vocabulary_size=vocabulary_size,
        policy_version=rollouts.policy_version,
    )
    attempt.write_table("sequences", result.sequences)
    attempt.write_table("quarantine", result.quarantine)
    refused, requested = result.quarantine.num_rows, result.ledger.requested
    if refused > config.validation.max_quarantine_fraction * requested or result.sequences.num_rows == 0:
        raise DataError(
            f"iteration {iteration}: {refused} of {requested} rollouts were refused ({result.reasons}), "
            f"{result.sequences.num_rows} sequences are left; validation.max_quarantine_fraction is "
            f"{config.validation.max_quarantine_fraction}. The evidence is in {stage.location.uri} (dataset quarantine)."
        )
    tokens = sum(len(row) for row in result.sequences.column("token_ids").to_pylist())
    trained = sum(sum(row) for row in result.sequences.column("loss_mask").to_pylist())
    return attempt.commit(
        inputs={"rollouts": rollouts},
        counts=result.ledger.counts() | {"sequences": result.sequences.num_rows, "quarantined": refused},
        metrics={
            "validate/sequences": result.sequences.num_rows,
            "validate/quarantined": refused,
            "validate/tokens": tokens,
            "validate/trained_tokens": trained,
        },
        details={"reasons": result.reasons, "failures": result.ledger.failures},
    )
