"""Checkpoints: a Hugging Face directory plus trainer state, published by one manifest, and retention.

    checkpoints/000012/a0001-1f3c9a2e/config.json, model.safetensors, tokenizer…   ready for transformers and vLLM
    checkpoints/000012/a0001-1f3c9a2e/trainer/…                                     optimizer, scheduler, RNG, cursor
    checkpoints/000012/manifest.json                                                written last; names the directory

Invariants: a directory without a manifest is not a checkpoint, and retention deletes the manifest before any file.
Every attempt writes into a separate directory, so published files are written once.

An iteration that cannot be trained on is skipped: it leaves a train stage with the reason, a report, and a version with
the previous version's files, byte for byte. The next iteration, a restart, an evaluation and a fork need no special
case, and the record shows that no step was made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from roundhouse.errors import DataError, StoreError
from roundhouse.health.policy import code_of, kind_of
from roundhouse.store.directories import take_over, upload_model
from roundhouse.store.run import SKIPPED, Run, Skip, promoted_version, questioned_versions, skip_of, trained_since_state
from roundhouse.store.stage import MANIFEST, WEIGHTS_DIGEST, ModelFiles, Reference, StageKind, faults_of, read_manifest
from roundhouse.weight_sync.tensor_files import digest_of


def publish_starting_policy(run: Run, directory: Path, details: dict[str, object], *, move: bool = False) -> Reference:
    """Commit version 0 from a local Hugging Face directory. With `move`, move its files."""
    stage = run.checkpoint(0)
    attempt = run.begin(stage, policy_version=0)
    digest = _weights_digest(directory)
    written = upload_model(stage.location, attempt.name, directory, move=move)
    for entry in written.files:
        attempt.adopt(entry)
    reference = attempt.commit(details=details | digest, directory=written.directory)
    run.point_to(reference)
    return reference


def publish(run: Run, update: Reference) -> Reference:
    """Publish the version that a train stage wrote: check its files, commit the manifest, move the pointer.

    A file is not read again if its stamp is unchanged since its digest was taken. The trainer took the digest of the
    tensors while it wrote them; a checkpoint without this digest is read once.

    Raises:
        StoreError: the files differ from the train stage's record.
    """
    manifest = read_manifest(update)
    version = update.iteration
    stage = run.checkpoint(version)
    if (earlier := stage.reference()) is not None:
        return earlier
    attempt = run.begin(stage, policy_version=version)
    written = ModelFiles.written_by(manifest)
    for entry, what in zip(written.files, faults_of(stage.location, written.files, as_written=True), strict=True):
        if what is not None:
            raise StoreError(
                f"{stage.location.uri}/{entry.path} is not what the train stage of iteration {version} wrote. "
                f"Delete {update.uri}/{MANIFEST} to train the iteration again."
            )
        attempt.adopt(entry)
    # Without the trainer's digest the tensors are read, which of a bucket means to fetch them once
    if written.weights_digest is not None:
        digest: dict[str, object] = {WEIGHTS_DIGEST: written.weights_digest}
    else:
        location = run.checkpoint(version).location
        place = location / written.directory if written.directory else location
        if place.is_local:
            digest = _weights_digest(place.local_path)
        else:
            with tempfile.TemporaryDirectory() as directory:
                place.download([*written.weights()], Path(directory))
                digest = _weights_digest(Path(directory))
    reference = attempt.commit(
        inputs={"train": update}, metrics=manifest.metrics, details=digest, directory=written.directory
    )
    run.point_to(reference)
    return reference


def reference_version(run: Run, base: int) -> int:
    """The version that is the reference when version `base` is trained from: the newest that `reference_every` made it, counted
    from the version that the run began with; 0 before, and without it."""
    every = run.config.train.algorithm.reference_every
    passed = 0 if every is None else (base - run.first_version) // every * every
    return run.first_version + passed if passed > 0 else 0


def retain(run: Run, newest: int) -> list[int]:
    """Delete the checkpoints that `checkpoint.keep_last` and `keep_every` do not keep; return their versions.

    Version 0 stays, the starting policy, and the reference of the next iteration; so does the version that a fork starts from,
    the start of its curve, the promoted one, those about which a person has been asked, and for each that is kept the one with
    its optimizer's state.
    """
    config, versions = run.config.checkpoint, run.checkpoint_versions()
    needed = [0, run.first_version, promoted_version(run), reference_version(run, newest), *questioned_versions(run)]
    kept_versions = set(versions).intersection(needed)
    kept_versions |= {
        version
        for version in versions
        if version > newest - config.keep_last or (config.keep_every > 0 and version % config.keep_every == 0)
    }
    references = [run.checkpoint(version).reference() for version in kept_versions]
    kept_versions |= {trained_since_state(one)[0].policy_version for one in references if one is not None}
    deleted: list[int] = []
    for version in versions:
        if version in kept_versions:
            continue
        if not deleted and (last := run.checkpoint(max(newest, *versions)).reference()) is not None:
            run.point_to(last)  # a kill may have left an old pointer, which finds no newer version beyond a gap
        run.refuse_lost_lease()
        location = run.checkpoint(version).location
        location.delete(MANIFEST)
        location.delete_tree()
        deleted.append(version)
    return deleted


def _weights_digest(directory: Path) -> dict[str, object]:
    """Return the digest of the directory's tensors; empty if a file is not a safetensors file, which the engine
    rejects with its own error."""
    try:
        return {WEIGHTS_DIGEST: digest_of(directory)}
    except DataError:
        return {}


def skip_after(error: BaseException, reason: str) -> Skip:
    """The record of an iteration that is skipped because of this error."""
    return Skip(code_of(error), kind_of(error).value, str(error)[:4000], reason)


def skip_iteration(run: Run, iteration: int, skip: Skip) -> Reference:
    """Publish version `iteration` as a copy of the previous one. Publish an already trained version as it is.

    Raises:
        StoreError: the previous version is not complete.
    """
    stage = run.stage(iteration, StageKind.TRAIN)
    update = stage.reference()
    if update is None:
        base = run.checkpoint(iteration - 1).reference()
        assert base is not None, "an iteration begins with the checkpoint of the version before"
        attempt = run.begin(stage, policy_version=base.policy_version)
        copied = take_over(base, run.checkpoint(iteration).location, attempt.name)
        update = attempt.commit(
            inputs={"base": base},
            counts={"sequences": 0},
            metrics={"train/skipped": 1.0, "time/compute": 0.0},
            details=copied.details()
            | {SKIPPED: {name: getattr(skip, name) for name in ("code", "kind", "error", "reason")}},
        )
    return publish(run, update)


def skipped_in_a_row(run: Run, before: int) -> int:
    """Count the skipped iterations directly before this one."""
    count = 0
    while before - count - 1 > run.first_version and skip_of(run, before - count - 1) is not None:
        count += 1
    return count
