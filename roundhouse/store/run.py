"""A run in the store: its identity, its stages by iteration, its checkpoints.

    <store>/runs/<run_id>/run.json
    <store>/runs/<run_id>/iterations/000012/<stage>/
    <store>/runs/<run_id>/checkpoints/000012/
    <store>/runs/<run_id>/latest.json
    <store>/runs/<run_id>/lease/000003.json      who drives it

Iteration k (from 1) refits the engine to version k-1, and its training makes version k. Version 0 is the starting policy.

Invariant: a run's identity is created once. Opening it again with a configuration that would make other data is refused; only
keys that steer how the run is carried out may change (`config.section.Operational`).

`promoted.json` points to the version that is the one to use, as `roundhouse.stages.promotion` decides.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from roundhouse.config.loading import changes_of_identity, config_digest, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, StoreError
from roundhouse.store.lease import fence_of
from roundhouse.store.lineage import (
    IDENTITY,
    Parent,
    code_version,
    create_identity,
    parent_at,
    read_identity,
    refuse_unloadable,
)
from roundhouse.store.location import Location, NotFound, is_name
from roundhouse.store.stage import MANIFEST, Attempt, Manifest, Provenance, Reference, Stage, StageKind, read_manifest


@dataclass(frozen=True)
class Run:
    """An opened run."""

    location: Location
    config: RunConfig
    uid: str
    """Told apart from an earlier run of the same id that was deleted."""
    created_at: float
    code_version: str
    parent: Parent | None = None
    """Of a fork."""

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @functools.cached_property
    def config_digest(self) -> str:
        return config_digest(self.config)

    @property
    def first_version(self) -> int:
        """The version that the run starts from: 0, or the parent's where it was forked."""
        return 0 if self.parent is None else self.parent.version

    def stage(self, iteration: int, kind: str) -> Stage:
        """A stage of an iteration (iteration 0 holds what comes before the first)."""
        place = self.location / f"iterations/{iteration:06d}/{kind}"
        return Stage(place, kind=kind, run_id=self.run_id, iteration=iteration)

    def checkpoint(self, version: int) -> Stage:
        """The checkpoint of a policy version."""
        place = self.location / f"checkpoints/{version:06d}"
        return Stage(place, kind=StageKind.CHECKPOINT, run_id=self.run_id, iteration=version)

    def trainer_state(self, version: int) -> Stage:
        """The trainer's state of a policy version whose checkpoint was published before it was written."""
        place = self.checkpoint(version).location / STATE
        return Stage(place, kind=STATE, run_id=self.run_id, iteration=version)

    def begin(self, stage: Stage, *, policy_version: int) -> Attempt:
        """Start an attempt at one of this run's stages."""
        return stage.begin(
            Provenance(
                policy_version=policy_version,
                config_digest=self.config_digest,
                code_version=self.code_version,
                seed=self.config.seed,
            ),
            fence_of(self.location),
        )

    def refuse_lost_lease(self) -> None:
        """Before something that other drivers read is replaced or deleted, outside of a stage's commit.

        Raises:
            LeaseLost: this process drove the run, and another one does now.
        """
        if (fence := fence_of(self.location)) is not None:
            fence.check()

    def checkpoint_versions(self) -> list[int]:
        """Versions with a complete checkpoint, ascending."""
        versions = [int(name) for name in (self.location / "checkpoints").names() if name.isdigit()]
        return [version for version in sorted(versions) if self.checkpoint(version).reference() is not None]

    def latest_checkpoint(self) -> Reference | None:
        """The newest complete checkpoint; None before the starting policy is there."""
        pointed = None
        with contextlib.suppress(NotFound, ValidationError):
            # Only the version counts: where a checkpoint lies, the run knows itself.
            pointed = Reference.model_validate_json(self.location.read("latest.json")).policy_version
        newest = self._newest_from(pointed)
        if newest is None:  # the pointer is lost, damaged, or so old that retention deleted what it names
            newest = self._newest_from(max(self.checkpoint_versions(), default=self.first_version))
        return newest

    def _newest_from(self, version: int | None) -> Reference | None:
        """The last of the complete versions that follow this one without a gap. The pointer is written after the manifest, and
        a bucket may list late: the true newest is the version that is named, or one that came right after."""
        found = None
        while version is not None and (newer := self.checkpoint(version).reference()) is not None:
            found, version = newer, version + 1
        return found

    def is_reported(self, iteration: int) -> bool:
        """Whether an iteration is finished, its report included."""
        return self.stage(iteration, StageKind.REPORT).reference() is not None

    def point_to(self, checkpoint: Reference) -> None:
        """Let `latest.json` name this checkpoint."""
        self.refuse_lost_lease()
        self.location.write("latest.json", checkpoint.model_dump_json(indent=1).encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the finished run's summary."""
        self.refuse_lost_lease()
        self.location.write("summary.json", (json.dumps(summary, indent=1) + "\n").encode())

    def summary(self) -> dict[str, Any] | None:
        """The finished run's summary; None while it has not finished."""
        try:
            return json.loads(self.location.read("summary.json"))
        except NotFound:
            return None


def open_run(config: RunConfig, *, first_start: bool = False) -> Run:
    """Create the run, or open the one of that id to continue it.

    Args:
        first_start: a person has just asked for this run; it is no later stage or retry of a start. Only then does
            `resume.mode: disable` refuse a run that exists.

    Raises:
        ConfigError: the run exists and may not be continued, exists with another configuration, or cannot be forked so.
    """
    location = Location(config.store) / f"runs/{config.run_id}"
    try:
        identity = read_identity(location)
        _refuse_existing(config, first_start)
    except NotFound:
        parent = None
        if config.resume.path is not None:
            parent = parent_at(config.resume.path)
            refuse_unloadable(parent, config)
        identity, created = create_identity(location, config, parent)
        if not created:  # a concurrent process did
            _refuse_existing(config, first_start)
    old = parse_config(identity["config"], origin="run.json", recorded=True)
    if changed := changes_of_identity(old, config):
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in changed.items())
        raise ConfigError(
            f"Run {config.run_id!r} exists with another configuration:\n{lines}\n"
            "Take these changes back to continue it, or start a new run with --set run_id=<another name>."
        )
    run = _opened(location, config, identity)
    path = config.resume.path
    if path is not None and (run.parent is None or Location(path).uri != run.parent.checkpoint.uri):
        origin = "its own starting policy" if run.parent is None else run.parent.checkpoint.uri
        raise ConfigError(
            f"Run {run.run_id!r} exists and began from {origin}, not from resume.path={path!r}. Choose another run_id, or "
            "continue it with --set resume.mode=auto and without resume.path."
        )
    return run


def run_exists(store: str, run_id: str) -> bool:
    """Whether a run of that id was created."""
    return is_name(run_id) and (Location(store) / f"runs/{run_id}").exists(IDENTITY)


def _opened(location: Location, config: RunConfig, identity: dict[str, Any]) -> Run:
    parent = None if identity.get("parent") is None else Parent.model_validate(identity["parent"])
    return Run(location, config, identity["uid"], identity["created_at"], code_version(), parent)


def no_such_run(store: str, run_id: str) -> StoreError:
    """The error of a run that is not there; it lists those that are."""
    there = ", ".join(run_ids(store)) or "none"
    return StoreError(f"No run {run_id!r} in {Location(store).uri}. Runs there: {there}.")


def no_such_version(run: Run, version: int | None) -> StoreError:
    """The error of a version that has no checkpoint; it lists those that have one."""
    there = ", ".join(map(str, run.checkpoint_versions())) or "none"
    return StoreError(
        f"Run {run.run_id!r} has no checkpoint of version {version}. It has: {there} (checkpoint.keep_last and keep_every "
        "decide which stay)."
    )


def load_run(store: str, run_id: str) -> Run:
    """Open an existing run with the configuration it was created with.

    Raises:
        StoreError: there is no such run (the ones there are get listed), or its run.json was edited.
    """
    root = Location(store)
    location = root / f"runs/{run_id}"
    try:
        identity = read_identity(location)
    except NotFound:
        raise no_such_run(store, run_id) from None
    return _opened(
        location, parse_config(identity["config"], origin=f"{location.uri}/run.json", recorded=True), identity
    )


def run_ids(store: str) -> list[str]:
    """Ids of all runs of a store. A directory without an identity is what is left of a deleted one."""
    names = (Location(store) / "runs").names()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        there = pool.map(functools.partial(run_exists, store), names)
        return list(itertools.compress(names, there))


_AT_ONCE = 16
"""Requests for identities, of which a bucket answers each in some hundredths of a second."""


def _refuse_existing(config: RunConfig, first_start: bool) -> None:
    if first_start and config.resume.mode == "disable":
        raise ConfigError(
            f"Run {config.run_id!r} exists in {config.store}, and resume.mode is 'disable'. Choose another run_id, or continue "
            "it with --set resume.mode=auto."
        )


APPROVALS = "questions"
"""Directory of a run: promotions that wait for an answer, a file a version."""
POINTER = "promoted.json"


class Promoted(Reference):
    """The promoted version's checkpoint."""

    approval: str | None = None
    """Who approved, with what comment; None if no approval was asked for."""


def promoted_version(run: Run) -> int | None:
    """The promoted version; None before the first evaluation."""
    try:
        return Promoted.model_validate_json(run.location.read(POINTER)).policy_version
    except NotFound:
        return None


def questioned_versions(run: Run) -> list[int]:
    """Versions that wait for an answer, as far as the store lists them; the bucket is asked only where there may be some."""
    if not run.config.evaluation.approval.required:
        return []
    return [int(name.removesuffix(".json")) for name in (run.location / APPROVALS).names()]


def version_named(run: Run, name: str) -> int:
    """The version that `newest`, `promoted` or a number means.

    Raises:
        ConfigError: nothing is promoted or made yet, or it is neither of these.
    """
    if name.isdecimal():
        return int(name)
    if name == "promoted":
        if (promoted := promoted_version(run)) is None:
            raise ConfigError(
                f"Run {run.run_id!r} has no promoted checkpoint: no version was evaluated, or promotion is off "
                "(evaluation.promotion_confidence). Name newest or a version, or evaluate it: roundhouse evaluate."
            )
        return promoted
    if name != "newest":
        raise ConfigError(f"{name!r} names no checkpoint: newest, promoted or the number of a version.")
    if (newest := run.latest_checkpoint()) is None:
        raise ConfigError(f"Run {run.run_id!r} has no checkpoint yet.")
    return newest.policy_version


def point_to_promoted(run: Run, version: int, approval: str | None = None) -> None:
    """Move the pointer, never back: a repeated start passes by older decisions again."""
    current, checkpoint = promoted_version(run), run.checkpoint(version).reference()
    if checkpoint is not None and (current is None or current < version):
        promoted = Promoted(**checkpoint.model_dump(), approval=approval)
        run.refuse_lost_lease()
        run.location.write(POINTER, promoted.model_dump_json(indent=1).encode())


SKIPPED = "skipped"
"""In the details of the train stage's manifest, and as metric `train/skipped`."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Why an iteration was not trained on."""

    code: str
    kind: str
    error: str
    reason: str
    """Of the decision (`roundhouse.health.policy`)."""


def skip_of(run: Run, iteration: int) -> Skip | None:
    """Why an iteration was skipped; None when it was not."""
    reference = run.stage(iteration, StageKind.TRAIN).reference()
    details = {} if reference is None else read_manifest(reference).details
    return Skip(**details[SKIPPED]) if SKIPPED in details else None


TRAINER = "trainer"
"""Subdirectory of the trainer's state."""
STATE = "state"
"""Directory and kind of the stage that holds it where the checkpoint does not."""


def state_of(checkpoint: Reference) -> Reference | None:
    """What holds the trainer's state of a version: its checkpoint, or a stage below that was completed later; None so far."""
    manifest = read_manifest(checkpoint)
    if manifest.model_files.holds(TRAINER):
        return checkpoint
    place = Location(checkpoint.uri) / STATE
    later = Stage(place, kind=STATE, run_id=manifest.run_id, iteration=manifest.iteration).reference()
    # of the same training step, not of one that was made again
    if later is None or read_manifest(later).inputs["train"].digest != manifest.inputs["train"].digest:
        return None
    return later


def trained_since_state(version: Reference) -> tuple[Reference, list[Reference]]:
    """The newest checkpoint up to this one that a trainer continues from, and the sequences of the iterations since, in order.

    That checkpoint holds the trainer's state, or is where training began. It is found by lineage: a checkpoint names the train
    stage that made it, which names its sequences and the checkpoint that it began from. Of a checkpoint in between that
    retention deleted, the train stage is still there. A skipped iteration has no sequences.

    Raises:
        StoreError: one of them is gone.
    """
    since: list[Reference] = []
    while True:
        if not Location(version.uri).exists(MANIFEST):
            train: Manifest | None = _training_of(version)
        elif version.policy_version == 0 or state_of(version) is not None:
            return version, since[::-1]
        else:
            inputs = read_manifest(version).inputs
            if "parent" in inputs:
                version = inputs["parent"]
                continue
            train = read_manifest(inputs["train"]) if "train" in inputs else None
        if train is None or "base" not in train.inputs:
            return version, since[::-1]
        if "sequences" in train.inputs:
            since.append(train.inputs["sequences"])
        version = train.inputs["base"]


def _training_of(deleted: Reference) -> Manifest:
    """The train stage of a version whose checkpoint is gone.

    Raises:
        StoreError: it is gone, too.
    """
    run, k = deleted.uri.rsplit("/checkpoints/", 1)[0], deleted.policy_version
    place = Location(run) / f"iterations/{k:06d}/{StageKind.TRAIN}"
    reference = Stage(place, kind=StageKind.TRAIN, run_id="", iteration=k).reference()
    if reference is None:
        raise StoreError(
            f"{deleted.uri} has no {MANIFEST}, and {place.uri} neither: what was trained there is not known."
        )
    return read_manifest(reference)
