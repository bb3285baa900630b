"""A run's identity and lineage: the checkpoint of another run from which it starts.

Invariant: a fork owns its inputs. It copies version 0 (the reference policy) and its starting version into its
directory, so retention, garbage collection and deletion in the parent do not affect it. On one file system the copy is
a hard link without bytes; in S3 the server copies.

    runs/wide/run.json   "parent": {"run_id": "base", "uid": "…", "version": 12, "checkpoint": {"uri": …, "digest": …}}
    runs/wide/checkpoints/000000/  000012/      the parent's files under manifests of the fork; it trains 000013 next

A run's identity (`run.json`) is created once, and is valid only while it and its configuration have their recorded
digests.
"""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundhouse import __version__
from roundhouse.config.loading import config_digest, differences, digest_of_tree, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.config.renamed import translated
from roundhouse.errors import ConfigError, StoreError
from roundhouse.store.directories import take_over
from roundhouse.store.location import AlreadyExists, Location, NotFound
from roundhouse.store.stage import MANIFEST, ModelFiles, Reference, Stage, StageKind, read_manifest

if TYPE_CHECKING:
    from roundhouse.store.run import Run

FIXED_BY_CHECKPOINT = ("policy.", "train.lora")
"""Keys that a fork shares with its parent: the model's shape and tokenizer, and whether an adapter's optimizer state or the
whole model's is in `trainer/`. With other values the checkpoint could not be loaded. All others may differ."""

_PLACE = re.compile(r"(?P<run>.+/runs/(?P<run_id>[^/]+))/checkpoints/(?P<version>\d{6,})")


class Parent(BaseModel):
    """The checkpoint that a fork starts from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    uid: str
    """Unique ID of the parent run."""
    version: int
    checkpoint: Reference


def parent_at(path: str) -> Parent:
    """Return the run and version of the checkpoint at this URI.

    Raises:
        ConfigError: no complete checkpoint of a run is at the URI; the text lists the existing ones.
    """
    location = Location(path)
    if (place := _PLACE.fullmatch(location.uri)) is None:
        raise ConfigError(
            f"resume.path: {location.uri} is not a checkpoint of a run (<store>/runs/<run>/checkpoints/<version>). To start "
            f"from weights alone, set policy.kind=pretrained and policy.path={path} instead."
        )
    version = int(place["version"])
    reference = Stage(location, kind=StageKind.CHECKPOINT, run_id=place["run_id"], iteration=version).reference()
    if reference is None:
        checkpoints = _checkpoints(place["run"])
        whole = [name for name in checkpoints.names() if (checkpoints / name).exists(MANIFEST)]
        raise ConfigError(
            f"resume.path: {location.uri} holds no complete checkpoint: it was not made, or retention deleted it "
            f"(checkpoint.keep_last, keep_every). Versions there: {', '.join(whole) or 'none'}."
        )
    return Parent(run_id=place["run_id"], uid=_identity(place["run"])["uid"], version=version, checkpoint=reference)


def refuse_unloadable(parent: Parent, config: RunConfig) -> None:
    """Refuse a fork's configuration with which the parent's checkpoint cannot be loaded.

    Raises:
        ConfigError: it differs in a key of `FIXED_BY_CHECKPOINT`.
    """
    run = _run_of(parent)
    old = parse_config(_identity(run)["config"], origin=f"{run}/run.json", recorded=True)
    changed = {key: pair for key, pair in differences(old, config).items() if key.startswith(FIXED_BY_CHECKPOINT)}
    if changed:
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in changed.items())
        raise ConfigError(
            f"Version {parent.version} of run {parent.run_id!r} cannot be continued with another policy:\n{lines}\n"
            "Take these changes back; every other key may differ."
        )


Take = Callable[[Reference, Location, str], ModelFiles]
"""Makes the files of a checkpoint those of an attempt at another one, as `take_over` does."""


def adopt_checkpoints(run: Run, take: Take = take_over) -> Reference:
    """Take the parent's checkpoints into the fork, once; the reference of the version that it starts from.

    Args:
        take: of the version that the fork starts from.

    Raises:
        StoreError: the parent has lost one before it was taken.
    """
    assert run.parent is not None, "only a fork adopts"
    parent = run.parent
    if (earlier := run.checkpoint(parent.version).reference()) is not None:
        return earlier
    if parent.version > 0 and run.checkpoint(0).reference() is None:
        _adopt(run, 0, _parents_reference(parent, 0), take_over)
    reference = _adopt(run, parent.version, _parents_reference(parent, parent.version), take)
    run.point_to(reference)
    return reference


def _adopt(run: Run, version: int, origin: Reference, take: Take) -> Reference:
    manifest, stage = read_manifest(origin), run.checkpoint(version)
    attempt = run.begin(stage, policy_version=version)
    taken = take(origin, stage.location, attempt.name)
    for entry in taken.files:
        attempt.adopt(entry)
    return attempt.commit(
        inputs={"parent": origin}, metrics=manifest.metrics, details=manifest.details, directory=taken.directory
    )


def _parents_reference(parent: Parent, version: int) -> Reference:
    if version == parent.version:
        read_manifest(parent.checkpoint)  # raises if it is gone or differs from the recorded one
        return parent.checkpoint
    location = _checkpoints(_run_of(parent)) / f"{version:06d}"
    reference = Stage(location, kind=StageKind.CHECKPOINT, run_id=parent.run_id, iteration=version).reference()
    if reference is None:
        raise StoreError(f"{location.uri}/{MANIFEST} is missing: run {parent.run_id!r} has lost its starting policy.")
    return reference


def _run_of(parent: Parent) -> str:
    place = _PLACE.fullmatch(parent.checkpoint.uri)
    assert place is not None, "a parent was made by `parent_at`"
    return place["run"]


def _checkpoints(run: str) -> Location:
    return Location(run) / "checkpoints"


def _identity(run: str) -> dict[str, Any]:
    location = Location(run)
    try:
        return read_identity(location)
    except NotFound:
        raise ConfigError(
            f"resume.path: {location.uri} has no run.json: the checkpoint has been moved out of its run."
        ) from None


IDENTITY = "run.json"
FIRST_DRAW = "first_draw"
"""In an identity: the iteration that draws the first tasks of the first epoch."""


def first_draw_of(identity: dict[str, Any]) -> int:
    """Return the iteration that draws the first tasks of the first epoch: 1; 0 in runs of older versions and their forks."""
    return int(identity.get(FIRST_DRAW, 0))


def create_identity(
    location: Location, config: RunConfig, parent: Parent | None, **more: Any
) -> tuple[dict[str, Any], bool]:
    """Return the identity of the run at `location`, and whether this call created it.

    Args:
        more: further recorded fields, as JSON.
    """
    identity: dict[str, Any] = {
        "run_id": config.run_id,
        "uid": uuid.uuid4().hex[:12],
        "created_at": time.time(),
        "config": config.model_dump(mode="json"),
        "config_digest": config_digest(config),
        "code_version": code_version(),
        "parent": None if parent is None else parent.model_dump(mode="json"),
        FIRST_DRAW: 1 if parent is None else first_draw_of(_identity(_run_of(parent))),
        **more,
    }
    identity["identity_digest"] = _digest_of_identity(identity)
    try:
        location.create(IDENTITY, (json.dumps(identity, indent=1) + "\n").encode())
    except AlreadyExists:
        return read_identity(location), False
    return identity, True


def read_identity(location: Location) -> dict[str, Any]:
    """Return the identity of the run in this directory, with its configuration under current names.

    Raises:
        NotFound: the run does not exist.
        StoreError: it is damaged, or its configuration differs from that of the run's creation.
    """
    data, place = location.read(IDENTITY), f"{location.uri}/{IDENTITY}"
    try:
        identity: dict[str, Any] = json.loads(data)
        _Identity.model_validate(identity)
        digest, recorded = digest_of_tree(identity["config"]), identity["config_digest"]
        whole = _digest_of_identity(identity)
        config = translated(identity["config"])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise StoreError(f"{place} is damaged: {key}: {first['msg']}. Restore it from a copy.") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{place} is damaged: {error!r}. Restore it from a copy.") from error
    if digest != recorded:
        raise StoreError(
            f"{place}: its configuration has the digest {digest}, but the run was created with {recorded}: the file was "
            f"edited. Restore it from a copy. To change settings, use --set or a fork."
        )
    if identity.get("identity_digest", whole) != whole:  # missing in runs of earlier versions
        raise StoreError(
            f"{place} has the digest {whole}, and was created with {identity['identity_digest']}: the file was edited. "
            "Restore it from a copy."
        )
    return identity | {"config": config}


class _Identity(BaseModel):
    """Form of run.json."""

    run_id: str
    uid: str
    created_at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    config: dict[str, Any]
    config_digest: str
    code_version: str = ""
    parent: Parent | None = None


def _digest_of_identity(identity: dict[str, Any]) -> str:
    return digest_of_tree({key: value for key, value in identity.items() if key != "identity_digest"})


@functools.cache
def code_version() -> str:
    """`0.1.0`, or `0.1.0+g1a2b3c4d5e6f` in a git checkout (the commit, without a look at uncommitted changes)."""
    git = Path(__file__).resolve().parents[2] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        commit = (git / head.removeprefix("ref: ")).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return __version__
    return f"{__version__}+g{commit[:12]}"
