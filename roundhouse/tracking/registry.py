"""Checkpoints as versions of a registered model in MLflow, with the way back to the data they were trained on.

Invariant: a version points to the checkpoint in our store, copies nothing, and is registered once; the alias `promoted` is on
the version that the store calls promoted, and a version whose checkpoint retention has deleted says so.
"""

from __future__ import annotations

from typing import Any

from roundhouse.stages.approval import answer_to
from roundhouse.store.location import Location
from roundhouse.store.manifest import Reference, model_location
from roundhouse.store.promoted import promoted_version
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest

ALIAS = "promoted"
VERSION_TAG = "roundhouse.policy_version"
UID_TAG = "roundhouse.uid"
APPROVAL_TAG = "roundhouse.approval"
STATE_TAG = "roundhouse.checkpoint_state"
DELETED = "deleted"


def register_checkpoint(client: Any, run: Run, version: int, mlflow_run_id: str) -> str | None:
    """Register an evaluated checkpoint, and let the model follow the store; return the registered model's name.

    None when registration is off, or the checkpoint is not there.
    """
    name = model_name(run)
    checkpoint = run.checkpoint(version).reference()
    if name is None or checkpoint is None:
        return None
    _create_model(client, name)
    if registered_version(client, name, run, version) is None:
        place = _place(checkpoint).removeprefix("file://")
        said = (
            f"Policy version {version} of run {run.run_id}: the Hugging Face directory `{place}`. MLflow has no copy."
        )
        client.create_model_version(
            name,
            source=_source(checkpoint),
            run_id=mlflow_run_id,
            tags=_lineage(run, version, checkpoint),
            description=said,
        )
    follow_store(client, run)
    return name


def follow_store(client: Any, run: Run) -> None:
    """Put the alias on the promoted version, show people's answers, and mark versions whose checkpoints were deleted."""
    name = model_name(run)
    if name is None:
        return
    promoted = promoted_version(run)
    for found in client.search_model_versions(f"name = '{name}' and tags.`{UID_TAG}` = '{run.uid}'"):
        version = int(found.tags[VERSION_TAG])
        if version == promoted and ALIAS not in client.get_model_version(name, found.version).aliases:
            client.set_registered_model_alias(name, ALIAS, found.version)
        if APPROVAL_TAG not in found.tags and (answer := answer_to(run, version)) is not None:
            client.set_tag(found.run_id, f"{APPROVAL_TAG}.{version}", str(answer))
            client.set_model_version_tag(name, found.version, APPROVAL_TAG, str(answer))
        if found.tags.get(STATE_TAG) != DELETED and run.checkpoint(version).reference() is None:
            client.set_model_version_tag(name, found.version, STATE_TAG, DELETED)
            said = f"**Deleted from the store by retention** (`checkpoint.keep_last`, `keep_every`). {found.description or ''}"
            client.update_model_version(name, found.version, said)


def delete_versions(client: Any, run: Run) -> None:
    """Delete the run's model versions, and the registered model where no other run has one of it."""
    name = model_name(run)
    if name is None:
        return
    for version in client.search_model_versions(f"name = '{name}' and tags.`{UID_TAG}` = '{run.uid}'"):
        client.delete_model_version(name, version.version)
    known = client.search_registered_models(f"name = '{name}'")
    if known and not client.search_model_versions(f"name = '{name}'"):
        client.delete_registered_model(name)


def model_name(run: Run) -> str | None:
    """Name of the run's registered model; None when registration is off."""
    template = run.config.tracking.register_as
    return None if template is None else template.format(run_id=run.run_id)


def _create_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def registered_version(client: Any, name: str, run: Run, version: int) -> Any | None:
    found = client.search_model_versions(
        f"name = '{name}' and tags.`{UID_TAG}` = '{run.uid}' and tags.`{VERSION_TAG}` = '{version}'"
    )
    return client.get_model_version(name, found[0].version) if found else None


def _lineage(run: Run, version: int, checkpoint: Reference) -> dict[str, str]:
    """Tags: which checkpoint, and the manifests of the data that its last iteration was trained on."""
    tags = {
        VERSION_TAG: str(version),
        UID_TAG: run.uid,
        "roundhouse.run_id": run.run_id,
        "roundhouse.checkpoint": checkpoint.uri,
        "roundhouse.model": _place(checkpoint),
        "roundhouse.checkpoint_digest": checkpoint.digest,
        "roundhouse.code_version": run.code_version,
    }
    for kind in (StageKind.COLLECT, StageKind.VALIDATE):
        stage = run.stage(version, kind).reference()
        if stage is not None:
            tags[f"roundhouse.{kind}"] = f"{stage.uri}@{stage.digest}"
    evaluation = run.stage(version, StageKind.EVALUATE).reference()
    if evaluation is not None:
        tags["roundhouse.heldout_reward"] = f"{read_manifest(evaluation).metrics.get('evaluation/reward/mean'):.4f}"
    return tags


def _place(checkpoint: Reference) -> str:
    """URI of its Hugging Face directory."""
    return model_location(Location(checkpoint.uri)).uri


def _source(checkpoint: Reference) -> str:
    """MLflow's server refuses paths outside its own artifacts; under a scheme of ours it keeps them as a name."""
    place = _place(checkpoint)
    return "roundhouse" + place.removeprefix("file") if place.startswith("file://") else place
