"""NeMo Gym's files into a Parquet dataset of the store: a collect stage that validation and training read.

Invariant: the dataset gives back its files (`to_files`), equal value by value. A name and version that exist are not written
again: they are what they were.

    run.jsonl + run_failures.jsonl + run_materialized_inputs.jsonl  ->  <store>/datasets/<name>/<version>/
"""

from __future__ import annotations

import hashlib
from typing import Any

from roundhouse.compat.nemo_gym.exchange.files import CollectionFiles
from roundhouse.compat.nemo_gym.exchange.originals import DATASET, originals_table
from roundhouse.compat.nemo_gym.exchange.reading import read_collection
from roundhouse.errors import StoreError
from roundhouse.store.identity import code_version
from roundhouse.store.location import Location
from roundhouse.store.manifest import Provenance, Reference
from roundhouse.store.stage import Stage, StageKind, read_manifest
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.schemas import rollouts_table, turns_table

PART_ROLLOUTS = 1024
"""Rollouts in one Parquet part."""


def import_rollouts(
    files: CollectionFiles, store: str, name: str, version: str = "v000001", *, policy_version: int = 0
) -> Reference:
    """Import a collection as `<store>/datasets/<name>/<version>`; importing the same files again is a no-op.

    Args:
        policy_version: of the weights that made foreign rollouts; Roundhouse's own rows say it.

    Raises:
        DataError: a file cannot be read, or holds a (task, rollout) twice.
        StoreError: the version exists and was made of other files.
    """
    stage = Stage(Location(store) / f"datasets/{name}/{version}", kind=StageKind.COLLECT, run_id=name, iteration=0)
    digest = _digest(files)
    if (done := stage.reference()) is not None:
        _refuse_other(done, digest)
        return done
    found = read_collection(files, policy_version=policy_version)
    versions = {turn.policy_version for rollout in found.rollouts for turn in rollout.turns}
    provenance = Provenance(
        policy_version=max(versions, default=policy_version), config_digest=digest, code_version=code_version(), seed=0
    )
    attempt = stage.begin(provenance)
    for start in range(0, max(1, len(found.rollouts)), PART_ROLLOUTS):
        part = found.rollouts[start : start + PART_ROLLOUTS]
        attempt.write_table("turns", turns_table(part))
        attempt.write_table("rollouts", rollouts_table(part))
    if found.originals:
        attempt.write_table(DATASET, originals_table(found.originals))
    ledger = Ledger.from_rollouts(found.rollouts, requested=len(found.rollouts))
    details: dict[str, Any] = {"failures": ledger.failures, "imported": str(files.rollouts)}
    return attempt.commit(counts=ledger.counts(), details=details)


def _digest(files: CollectionFiles) -> str:
    digest = hashlib.sha256()
    for path in (files.rollouts, files.failures, files.materialized_inputs):
        if path.exists():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _refuse_other(reference: Reference, digest: str) -> None:
    manifest = read_manifest(reference)
    if manifest.provenance.config_digest != digest:
        raise StoreError(
            f"{reference.uri} exists and was imported from other files ({manifest.details.get('imported')}). "
            "Give the import another --name or --version."
        )
