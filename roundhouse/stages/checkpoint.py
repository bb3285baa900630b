"""Checkpoints: a Hugging Face directory plus trainer state, published by one manifest, and retention.

    checkpoints/000012/a0001-1f3c9a2e/config.json, model.safetensors, tokenizer…   ready for transformers and vLLM
    checkpoints/000012/a0001-1f3c9a2e/trainer/…                                     optimizer, scheduler, RNG, cursor
    checkpoints/000012/manifest.json                                                written last; names the directory

Invariants: a directory without a manifest is not a checkpoint, and retention takes the manifest away before any file. Every
attempt writes into a directory of its own, so what is published is written once.
"""

from __future__ import annotations

from pathlib import Path

from roundhouse.errors import DataError, StoreError
from roundhouse.stages.approval import questioned_versions
from roundhouse.store.directories import upload_model
from roundhouse.store.manifest import MANIFEST, FileEntry, Manifest, ModelFiles, Reference, sha256
from roundhouse.store.promoted import promoted_version
from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest
from roundhouse.weight_sync.checkpoint import WEIGHTS_DIGEST
from roundhouse.weight_sync.tensor_files import TensorFile, digest_of_tensors, tensor_digests

TRAINER = "trainer"
"""Subdirectory of the trainer's state."""


def publish_starting_policy(run: Run, directory: Path, details: dict[str, object]) -> Reference:
    """Commit version 0 from a local Hugging Face directory."""
    stage = run.checkpoint(0)
    attempt = run.begin(stage, policy_version=0)
    written = upload_model(stage.location, attempt.name, directory)
    for entry in written.files:
        attempt.adopt(entry)
    digest = _WeightsDigest()
    for path in directory.glob("*.safetensors"):
        digest.add(path)
    reference = attempt.commit(details=details | digest.details(), directory=written.directory)
    run.point_to(reference)
    return reference


def publish(run: Run, update: Reference) -> Reference:
    """Publish the version that a train stage wrote: check its files, commit the manifest, move the pointer.

    Raises:
        StoreError: the files are not those that the train stage recorded.
    """
    manifest = read_manifest(update)
    version = update.iteration
    stage = run.checkpoint(version)
    if (done := stage.reference()) is not None:
        return done
    attempt = run.begin(stage, policy_version=version)
    digest = _WeightsDigest()
    written = written_by(manifest)
    for name, entry in written.by_name().items():
        data = stage.location.read(entry.path)
        if sha256(data) != entry.sha256:
            raise StoreError(
                f"{stage.location.uri}/{entry.path} is not what the train stage of iteration {version} wrote. "
                f"Delete {update.uri}/{MANIFEST} to train the iteration again."
            )
        attempt.adopt(entry)
        if is_weights(name):
            digest.add(Path(name), data)
    reference = attempt.commit(
        inputs={"train": update}, metrics=manifest.metrics, details=digest.details(), directory=written.directory
    )
    run.point_to(reference)
    return reference


def written_by(train: Manifest) -> ModelFiles:
    """The new version's files, as the train stage recorded them."""
    return ModelFiles(
        directory=train.details.get("checkpoint_directory", ""),
        files=[FileEntry.model_validate(raw) for raw in train.details["checkpoint_files"]],
    )


def recorded(written: ModelFiles) -> dict[str, object]:
    """Them, for the details of the train stage's manifest."""
    return {
        "checkpoint_directory": written.directory,
        "checkpoint_files": [entry.model_dump() for entry in written.files],
    }


def is_weights(name: str) -> bool:
    """Whether a file of a model's directory holds weights of the policy, rather than the trainer's state."""
    return name.endswith(".safetensors") and "/" not in name


def retain(run: Run, newest: int) -> list[int]:
    """Delete the checkpoints that `checkpoint.keep_last` and `keep_every` do not keep; return their versions.

    Version 0 stays, the reference policy; so does the version that a fork starts from, the start of its curve, the promoted
    one, and those about which a person has been asked.
    """
    config = run.config.checkpoint
    deleted, always = [], {0, run.first_version, promoted_version(run), *questioned_versions(run)}
    for version in run.checkpoint_versions():
        kept_for_good = version in always or (config.keep_every > 0 and version % config.keep_every == 0)
        if kept_for_good or version > newest - config.keep_last:
            continue
        run.refuse_lost_lease()
        location = run.checkpoint(version).location
        location.delete(MANIFEST)
        location.delete_tree()
        deleted.append(version)
    return deleted


class _WeightsDigest:
    """Of a checkpoint's tensors, one file in memory at a time."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._whole = True

    def add(self, path: Path, content: bytes | None = None) -> None:
        try:
            self._digests |= tensor_digests([TensorFile(path, content)])
        except DataError:
            self._whole = False  # no safetensors file: the engine will refuse it in its own words

    def details(self) -> dict[str, object]:
        return {WEIGHTS_DIGEST: digest_of_tensors(self._digests)} if self._whole else {}
