"""Checkpoints as versions of a registered model in MLflow, with the way back to the data they were trained on.

Invariant: a version points to the checkpoint in our store, copies nothing, and is registered once; the alias `promoted` is on
the version that the store calls promoted.
"""

from __future__ import annotations

from typing import Any

from roundhouse.store.manifest import Reference
from roundhouse.store.promoted import promoted_version
from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest

ALIAS = "promoted"
VERSION_TAG = "roundhouse.policy_version"
UID_TAG = "roundhouse.uid"


def register_checkpoint(client: Any, run: Run, version: int, mlflow_run_id: str) -> str | None:
    """Register an evaluated checkpoint and set the alias; return the registered model's name.

    None when registration is off, or the checkpoint is not there.
    """
    template = run.config.tracking.register_as
    checkpoint = run.checkpoint(version).reference()
    if template is None or checkpoint is None:
        return None
    name = template.format(run_id=run.run_id)
    _create_model(client, name)
    if registered_version(client, name, run, version) is None:
        client.create_model_version(
            name, source=_source(checkpoint), run_id=mlflow_run_id, tags=_lineage(run, version, checkpoint)
        )
    promoted = promoted_version(run)
    found = None if promoted is None else registered_version(client, name, run, promoted)
    if found is not None and ALIAS not in found.aliases:
        client.set_registered_model_alias(name, ALIAS, found.version)
    return name


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
        "roundhouse.checkpoint_digest": checkpoint.digest,
        "roundhouse.code_version": run.code_version,
    }
    for kind in ("collect", "validate"):
        stage = run.stage(version, kind).reference()
        if stage is not None:
            tags[f"roundhouse.{kind}"] = f"{stage.uri}@{stage.digest}"
    evaluation = run.stage(version, "evaluate").reference()
    if evaluation is not None:
        tags["roundhouse.heldout_reward"] = f"{read_manifest(evaluation).metrics.get('evaluation/reward_mean'):.4f}"
    return tags


def _source(checkpoint: Reference) -> str:
    """MLflow's server refuses paths outside its own artifacts; under a scheme of ours it keeps them as a name."""
    if checkpoint.uri.startswith("file://"):
        return "roundhouse" + checkpoint.uri.removeprefix("file")
    return checkpoint.uri
