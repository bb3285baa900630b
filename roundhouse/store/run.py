"""A run in the store: its identity, its stages by iteration, its checkpoints.

    <store>/runs/<run_id>/run.json
    <store>/runs/<run_id>/iterations/000012/<stage>/
    <store>/runs/<run_id>/checkpoints/000012/
    <store>/runs/<run_id>/latest.json
    <store>/runs/<run_id>/lease/000003.json      its driver

Iteration k (from 1) refits the engine to version k-1, and its training makes version k. Version 0 is the starting
policy.

Invariant: a run's identity is created once. Opening it with a configuration that would make other data is refused; only
keys that control the execution may change (`config.section.Operational`).

`promoted.json` points to the version to use (`roundhouse.stages.promotion`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from roundhouse.config.defaults import with_recorded_defaults
from roundhouse.config.loading import changes_of_identity, config_digest, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, InfraError, RoundhouseError, StoreError
from roundhouse.store.lease import fence_of
from roundhouse.store.lineage import (
    IDENTITY,
    Parent,
    code_version,
    create_identity,
    first_draw_of,
    parent_at,
    read_identity,
    refuse_unloadable,
)
from roundhouse.store.location import Location, NotFound, is_name
from roundhouse.store.run_inputs import INPUTS, Inputs, digest_of_inputs, recorded_inputs, settle_inputs
from roundhouse.store.stage import MANIFEST, Attempt, Manifest, Provenance, Reference, Stage, StageKind, read_manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """An opened run."""

    location: Location
    config: RunConfig
    uid: str
    """Unique ID, different from that of a deleted run with the same run ID."""
    created_at: float
    code_version: str
    parent: Parent | None = None
    """Parent of a fork."""
    recorded_first_draw: int = 1
    """Value in run.json (`roundhouse.store.lineage.first_draw_of`)."""
    first_inputs: Inputs | None = None
    """Values in run.json (`roundhouse.store.run_inputs`)."""
    has_other_inputs: bool = False
    """It reads other task rows than those on record, for a dataset."""

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @property
    def first_draw(self) -> int:
        """The iteration that draws the first tasks of the first epoch. In older runs 0, unless they count their epochs."""
        return 1 if self.config.rollout.counts_epochs else self.recorded_first_draw

    @functools.cached_property
    def inputs(self) -> Inputs | None:
        """Digests of the task rows and user code that the run is continued with; None if they are not on record."""
        return None if self.has_other_inputs else recorded_inputs(self.location, self.first_inputs)

    @functools.cached_property
    def config_digest(self) -> str:
        return config_digest(self.config)

    @property
    def first_version(self) -> int:
        """Return the version that the run starts from: 0, or the parent's version of a fork."""
        return 0 if self.parent is None else self.parent.version

    def stage(self, iteration: int, kind: str) -> Stage:
        """Return a stage of an iteration (iteration 0 holds the work before the first)."""
        place = self.location / f"iterations/{iteration:06d}/{kind}"
        return Stage(place, kind=kind, run_id=self.run_id, iteration=iteration)

    def checkpoint(self, version: int) -> Stage:
        """The checkpoint of a policy version."""
        place = self.location / f"checkpoints/{version:06d}"
        return Stage(place, kind=StageKind.CHECKPOINT, run_id=self.run_id, iteration=version)

    def trainer_state(self, version: int) -> Stage:
        """Return the stage of the trainer's state of a version that was published before its state was written."""
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
                inputs=None if self.inputs is None else digest_of_inputs(self.inputs),
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
            # Only the version counts: the run derives the checkpoint's place.
            pointed = Reference.model_validate_json(self.location.read("latest.json")).policy_version
        newest = self._newest_from(pointed)
        if newest is None:  # the pointer is lost, damaged, or so old that retention deleted its checkpoint
            newest = self._newest_from(max(self.checkpoint_versions(), default=self.first_version))
        return newest

    def _newest_from(self, version: int | None) -> Reference | None:
        """Return the last of the complete versions that follow this one without a gap. The pointer is written after the
        manifest, and a bucket may list late, so the newest version is the named one or a direct successor."""
        newest = None
        while version is not None and (newer := self.checkpoint(version).reference()) is not None:
            newest, version = newer, version + 1
        return newest

    def is_reported(self, iteration: int) -> bool:
        """Return whether an iteration is finished, including its report."""
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


def open_run(config: RunConfig, *, first_start: bool = False, inputs: Inputs | None = None) -> Run:
    """Create the run, or open the one of that ID to continue it.

    Args:
        first_start: a person has just requested this run; it is not a later stage or a retry. Only then does
            `resume.mode: disable` refuse an existing run.
        inputs: digests of the task rows and the user code of this start; None if they are unknown.

    Raises:
        ConfigError: the run exists and may not be continued, exists with another configuration or other inputs, or
            cannot be forked so.
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
        more = {} if inputs is None else {INPUTS: dict(inputs)}
        identity, created = create_identity(location, config, parent, **more)
        if not created:  # a concurrent process did
            _refuse_existing(config, first_start)
    old = parse_config(identity["config"], origin="run.json", recorded=True)
    config = with_recorded_defaults(config, changes_of_identity(old, config))
    if changed := changes_of_identity(old, config):
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in changed.items())
        raise ConfigError(
            f"Run {config.run_id!r} exists with another configuration:\n{lines}\n"
            "Take these changes back to continue it, start a new run with --set run_id=<another name>, or let one start from "
            f"its newest version: roundhouse runs fork {config.run_id} --run-id <another name> --set <key>=<value>."
        )
    if inputs is not None:
        settle_inputs(
            location, identity.get(INPUTS), inputs, config.run_id, accept=config.resume.changed_inputs == "accept"
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
    """Return whether a run of that ID exists."""
    return is_name(run_id) and (Location(store) / f"runs/{run_id}").exists(IDENTITY)


def _opened(location: Location, config: RunConfig, identity: dict[str, Any]) -> Run:
    parent = None if identity.get("parent") is None else Parent.model_validate(identity["parent"])
    first_draw, inputs = first_draw_of(identity), identity.get(INPUTS)
    return Run(location, config, identity["uid"], identity["created_at"], code_version(), parent, first_draw, inputs)


def no_such_run(store: str, run_id: str) -> StoreError:
    """Return the error of a missing run; it lists the existing ones."""
    existing = ", ".join(run_ids(store)) or "none"
    return StoreError(f"No run {run_id!r} in {Location(store).uri}. Runs there: {existing}.")


def no_such_version(run: Run, version: int | None) -> StoreError:
    """Return the error of a version without a checkpoint; it lists the existing ones."""
    existing = ", ".join(map(str, run.checkpoint_versions())) or "none"
    return StoreError(
        f"Run {run.run_id!r} has no checkpoint of version {version}. It has: {existing} (checkpoint.keep_last and keep_every "
        "set which versions are kept)."
    )


def load_run(store: str, run_id: str) -> Run:
    """Open an existing run with its recorded configuration.

    Raises:
        StoreError: the run does not exist (the text lists the existing ones), or its run.json was edited.
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


def readable_runs(store: str) -> list[Run]:
    """Return all readable runs of a store, and warn about each unreadable run.json.

    Raises:
        StoreError: the store has runs, and none of them can be read.
    """
    runs: list[Run] = []
    error: RoundhouseError | None = None
    for run_id in run_ids(store):
        try:
            runs.append(load_run(store, run_id))
        except (StoreError, ConfigError) as unreadable:
            error = unreadable
            log.warning("run %s is left out: %s", run_id, error)
    if error is not None and not runs:
        raise StoreError(f"No run of {Location(store).uri} can be read. The last error: {error}") from error
    return runs


def run_ids(store: str) -> list[str]:
    """Return the IDs of all runs of a store. Ignore directories without an identity, the remains of deleted runs."""
    names = (Location(store) / "runs").names()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        flags = pool.map(functools.partial(_has_identity, store), names)
        return list(itertools.compress(names, flags))


def _has_identity(store: str, name: str) -> bool:
    """Return whether a directory is a run; also if its identity cannot be read, an error that its reader reports."""
    try:
        return run_exists(store, name)
    except StoreError as error:
        if isinstance(error, InfraError):
            raise
        return True


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
    """Approver and comment; None if no approval was requested."""


def promoted_version(run: Run) -> int | None:
    """The promoted version; None before the first evaluation."""
    try:
        return Promoted.model_validate_json(run.location.read(POINTER)).policy_version
    except NotFound:
        return None


def questioned_versions(run: Run) -> list[int]:
    """Return the listed versions that wait for an answer. The bucket is read only if such versions are possible."""
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
                "(evaluation.promotion_confidence). Name `newest` or a version, or evaluate one: roundhouse evaluate."
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
    """Reason of the decision (`roundhouse.health.policy`)."""


def skip_of(run: Run, iteration: int) -> Skip | None:
    """Why an iteration was skipped; None when it was not."""
    reference = run.stage(iteration, StageKind.TRAIN).reference()
    details = {} if reference is None else read_manifest(reference).details
    return Skip(**details[SKIPPED]) if SKIPPED in details else None


TRAINER = "trainer"
"""Subdirectory of the trainer's state."""
STATE = "state"
"""Directory and kind of the stage that holds the state if the checkpoint does not."""


def state_of(checkpoint: Reference) -> Reference | None:
    """Return the holder of a version's trainer state: its checkpoint, or a stage that was completed later; None so
    far."""
    manifest = read_manifest(checkpoint)
    if manifest.model_files.holds(TRAINER):
        return checkpoint
    place = Location(checkpoint.uri) / STATE
    later = Stage(place, kind=STATE, run_id=manifest.run_id, iteration=manifest.iteration).reference()
    # of the same training step, not of a repeated one
    if later is None or read_manifest(later).inputs["train"].digest != manifest.inputs["train"].digest:
        return None
    return later


def trained_since_state(version: Reference) -> tuple[Reference, list[Reference]]:
    """Return the newest checkpoint up to this one with a trainer's state, and the sequences of the later iterations, in
    order.

    That checkpoint holds the trainer's state or is the start of training. It is found by lineage: a checkpoint names
    its train stage, which names its sequences and its input checkpoint. The train stage remains after retention deleted
    a checkpoint in between. A skipped iteration does not have sequences.

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
    """Return the train stage of a version with a deleted checkpoint.

    Raises:
        StoreError: it is gone, too.
    """
    run, k = deleted.uri.rsplit("/checkpoints/", 1)[0], deleted.policy_version
    place = Location(run) / f"iterations/{k:06d}/{StageKind.TRAIN}"
    reference = Stage(place, kind=StageKind.TRAIN, run_id="", iteration=k).reference()
    if reference is None:
        raise StoreError(
            f"{deleted.uri} has no {MANIFEST}, and neither has {place.uri}: the training of this version is unknown."
        )
    return read_manifest(reference)
