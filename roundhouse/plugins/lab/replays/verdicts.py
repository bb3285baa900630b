"""Judge stored rollouts with another verifier, reward function or version of their environment.

Invariants: nothing is generated and stored data does not change: the verdicts make a new dataset version for training.
A version is of one collection (one policy version) and of one judge; the same call is a no-op, and after a kill only
unfinished collections are judged. A rollout that cannot be rebuilt is `failed` there, with the code `not_rebuilt` and
its reason; a rollout that a rubric cannot score has the code of that failure. Neither has a reward, so neither is
trained on.

    runs/quickstart/iterations/000012/collect   ──>   datasets/mended/quickstart-i000012
                                                        rollouts, turns    as collected, with the new verdicts
                                                        verdicts           before and after, one row a rollout
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from roundhouse.activity import run_interruptible
from roundhouse.config.loading import apply_override, digest_of_tree, flatten, parse_config
from roundhouse.config.models import EnvironmentConfig, RunConfig
from roundhouse.environments import class_of
from roundhouse.errors import ConfigError, StoreError
from roundhouse.plugins.lab.replays.rollouts import Judged, judge, open_for_replay
from roundhouse.rollout.recording import failed_rollout
from roundhouse.stages.offline import find_datasets
from roundhouse.store.lineage import code_version
from roundhouse.store.location import Location
from roundhouse.store.run import Run, load_run
from roundhouse.store.stage import MANIFEST, Provenance, Reference, Stage, StageKind, read_manifest, read_table
from roundhouse.trajectories.records import FailureKind, Ledger, Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table

OUTCOMES = ("equal", "flipped", "refused", "unrewarded")
VERDICTS = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("outcome", pa.string()),  # equal, flipped, refused, unrewarded
        ("reward_before", pa.float64()),
        ("reward_after", pa.float64()),
        ("status_before", pa.string()),
        ("status_after", pa.string()),
        ("reason", pa.string()),  # of a rollout that was refused or had no reward
        ("detail", pa.string()),
    ]
)
"""Dataset `verdicts` of a re-scored version."""
EXAMPLES = 20
KEPT_DETAILS = ("sampling", "format", "imported", "with_tokens", "written", "tokenizer")
"""Facts of a judged version that its verdicts do not change."""

Progress = Callable[[int, int], None]
"""Called with (rollouts judged, rollouts in all)."""


@dataclass(slots=True)
class VerdictDiff:
    """Changes of the verdicts."""

    versions: list[str]
    """URIs of the dataset's versions."""
    counts: dict[str, int]
    """Rollouts by outcome."""
    by_task: dict[str, dict[str, int]]
    """For each task with a flip: rollouts by outcome."""
    reasons: dict[str, int]
    """Refused rollouts by reason."""
    flipped: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `VERDICTS` of the rollouts that flipped."""

    def as_json(self, examples: int = EXAMPLES) -> dict[str, Any]:
        return {
            "versions": self.versions,
            "counts": self.counts,
            "reasons": self.reasons,
            "by_task": self.by_task,
            "examples": self.flipped[:examples],
        }


def rescore(
    store: str,
    source: str | Sequence[str],
    name: str,
    *,
    iterations: range | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> VerdictDiff:
    """Judge the rollouts of a run, or of datasets, and store the verdicts as versions of the dataset `name`.

    Args:
        source: a run's ID, or names of datasets as in `offline.datasets`.
        iterations: of the run; by default all that collected.
        overrides: `environment.key=value` over the configuration of the collection.

    Raises:
        StoreError: nothing can be judged, or `name` holds verdicts of another judge or on another collection.
        ConfigError: the environment cannot be loaded, cannot be given recorded replies, or another key is overridden.
    """
    collected = collections_of(store, source, iterations)
    configs = {reference.uri: judging_config(store, reference, overrides).environment for reference in collected}
    total, requested = sum(reference.counts.get("requested", 0) for reference in collected), 0
    versions = []
    for reference in collected:
        config = configs[reference.uri]
        manifest = read_manifest(reference)
        parts = reference.uri.split("/")
        label = parts[-1] if parts[-3] == "datasets" else f"{manifest.run_id}-i{reference.iteration:06d}"
        place = Location(store) / f"datasets/{name}/{label}"
        if place.uri == reference.uri:
            raise ConfigError(f"--name {name}: this is the judged dataset; the verdicts need another name.")
        stage = Stage(place, kind=StageKind.COLLECT, run_id=manifest.run_id, iteration=reference.iteration)
        version = stage.reference()
        if version is None:
            version = _commit(stage, reference, config, judged_rollouts(reference, config, store))
        else:
            refuse_other_collection(version, reference, "verdicts")
            _refuse_other_judge(version, config)
        versions.append(version)
        requested += reference.counts.get("requested", 0)
        if progress is not None:
            progress(requested, total)
    return verdict_diff(versions)


def refuse_other_collection(version: Reference, collection: Reference, what: str) -> None:
    """
    Args:
        what: the version holds, for the message.

    Raises:
        StoreError: this version of a dataset was made of another collection, one of the same name or a former one in its place.
    """
    made_of = read_manifest(version).inputs.get("rollouts")
    if made_of is None or made_of.digest != collection.digest:
        theirs = "nothing that is on record" if made_of is None else _place_and_digest(made_of)
        raise StoreError(
            f"{version.uri} was made of {theirs}, not of {_place_and_digest(collection)}. Give these {what} another --name."
        )


def _place_and_digest(reference: Reference) -> str:
    return f"{reference.uri} ({reference.digest[:12]}…)"


def _refuse_other_judge(version: Reference, config: EnvironmentConfig) -> None:
    theirs, ours = flatten(read_manifest(version).details["judge"]), flatten(judge_of(config))
    # A key unknown at that time counts as unset
    if changed := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
        raise StoreError(
            f"{version.uri} holds the verdicts of another judge: {', '.join(changed)} differ. Give these verdicts another "
            "--name."
        )


def collections_of(store: str, source: str | Sequence[str], iterations: range | None = None) -> list[Reference]:
    """Return the complete collections of a run's iterations, or of datasets.

    Raises:
        StoreError: none exists, or a named iteration is without one; the text lists the existing ones.
    """
    if not isinstance(source, str):
        return find_datasets(store, source)
    run = load_run(store, source)
    existing = collected_iterations(run)
    iterations_wanted = sorted(existing) if iterations is None else list(iterations)
    if not iterations_wanted or (missing := [k for k in iterations_wanted if k not in existing]):
        lack = "no rollouts" if not iterations_wanted else f"no complete collection of iteration {missing[0]}"
        raise StoreError(
            f"Run {source!r} has {lack}; it has those of {', '.join(map(str, sorted(existing))) or 'none'}. A run that trains "
            "from datasets collects nothing: name its datasets."
        )
    return [existing[k] for k in iterations_wanted]


def collected_iterations(run: Run) -> dict[int, Reference]:
    """The complete collections of a run by iteration."""
    numbers = [int(name) for name in (run.location / "iterations").names() if name.isdigit()]
    references = {k: run.stage(k, StageKind.COLLECT).reference() for k in numbers}
    return {k: reference for k, reference in references.items() if reference is not None}


def judging_config(store: str, collection: Reference, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a collection's run with the judging environment: its own with the overrides.

    Raises:
        StoreError: the run is gone.
        ConfigError: an override of another section, or an impossible one; or an imported collection without an override.
    """
    for override in overrides:
        if override.partition("=")[0].strip().split(".")[0] != "environment":
            raise ConfigError(
                f"--set {override}: nothing but the environment judges a rollout; give environment.… keys."
            )
    manifest = read_manifest(collection)
    if "format" in manifest.details:  # imported: no run names its environment
        if not overrides:
            raise ConfigError(
                f"{collection.uri} was imported from {manifest.details['imported']}, which names no environment to judge with. "
                "Name one: --set environment.kind=…"
            )
        tree: dict[str, Any] = {"run_id": manifest.run_id}
    else:
        try:
            tree = load_run(store, manifest.run_id).config.model_dump(mode="json")
        except StoreError as error:
            raise StoreError(
                f"{error} It collected these rollouts, and its run.json names their environment."
            ) from error
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree, origin=f"the environment of {collection.uri}", recorded=True)


def judged_rollouts(collection: Reference, config: EnvironmentConfig, store: str | None = None) -> list[Judged]:
    """Every rollout of a collection, judged by the environment of this configuration; `store` as of `open_environment`."""
    tables = read_table(collection, "rollouts"), read_table(collection, "turns")
    return judge_all(rollouts_from_tables(*tables), config, store)


def judge_all(rollouts: Sequence[Rollout], config: EnvironmentConfig, store: str | None = None) -> list[Judged]:
    """These rollouts, judged by the environment of this configuration."""

    async def work() -> list[Judged]:
        async with open_for_replay(config, store) as environment:
            return [each async for each in judge(rollouts, environment)]

    return run_interruptible(work())


def verdict_diff(versions: Sequence[Reference]) -> VerdictDiff:
    """Count the verdict changes in these versions of a re-scored dataset."""
    rows = [row for version in versions for row in read_table(version, "verdicts").to_pylist()]
    return diff_of(rows, [version.uri for version in versions])


def diff_of(rows: Sequence[dict[str, Any]], versions: Sequence[str] = ()) -> VerdictDiff:
    """The same of rows of `VERDICTS`."""
    counts = Counter(row["outcome"] for row in rows)
    by_task: dict[str, Counter[str]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], Counter())[row["outcome"]] += 1
    return VerdictDiff(
        versions=list(versions),
        counts={outcome: counts[outcome] for outcome in OUTCOMES},
        by_task={task: dict(own) for task, own in sorted(by_task.items()) if own["flipped"]},
        reasons=dict(Counter(row["reason"] for row in rows if row["outcome"] == "refused")),
        flipped=[row for row in rows if row["outcome"] == "flipped"],
    )


def verdict_row(judged: Judged) -> dict[str, Any]:
    """A row of `VERDICTS`."""
    before, after = judged.before, judged.after
    return {
        "rollout_id": before.rollout_id,
        "group_id": before.group_id,
        "task_id": str(before.task.get("task_id", "")),
        "outcome": judged.outcome,
        "reward_before": before.reward,
        "reward_after": None if after is None else after.reward,
        "status_before": before.status.value,
        "status_after": None if after is None else after.status.value,
        "reason": judged.reason,
        "detail": judged.detail,
    }


def judge_of(config: EnvironmentConfig) -> dict[str, Any]:
    """Return the judge in the manifest's form: configuration and source of the environment."""
    description: dict[str, Any] = {"environment": config.model_dump(mode="json"), "source": ""}
    if not config.elsewhere():
        file = inspect.getsourcefile(class_of(config))
        description["source"] = "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return description


def _commit(stage: Stage, collection: Reference, config: EnvironmentConfig, judged: Sequence[Judged]) -> Reference:
    origin = read_manifest(collection)
    own = judge_of(config)
    attempt = stage.begin(
        Provenance(
            policy_version=collection.policy_version,
            config_digest=digest_of_tree(own),
            code_version=code_version(),
            seed=origin.provenance.seed,
        )
    )
    rollouts = [_stored(each) for each in judged]
    rows = [verdict_row(each) for each in judged]
    attempt.write_table("rollouts", rollouts_table(rollouts))
    attempt.write_table("turns", read_table(collection, "turns"))
    attempt.write_table("verdicts", pa.Table.from_pylist(rows, schema=VERDICTS))
    ledger = Ledger.from_rollouts(rollouts, requested=collection.counts["requested"])
    rewards = [reward for rollout in rollouts if (reward := rollout.counted_reward) is not None]
    diff = diff_of(rows)
    details = {name: origin.details[name] for name in KEPT_DETAILS if name in origin.details}
    if not diff.counts["flipped"] and "dynamic_sampling" in origin.details:
        details["dynamic_sampling"] = origin.details["dynamic_sampling"]  # its selection by rewards still holds
    return attempt.commit(
        inputs={
            "rollouts": collection,
            **{name: origin.inputs[name] for name in ("weights",) if name in origin.inputs},
        },
        counts=ledger.counts() | diff.counts,
        metrics={"reward/mean": sum(rewards) / len(rewards)} if rewards else {},
        details={"failures": ledger.failures, "judge": own, **details},
    )


def _stored(judged: Judged) -> Rollout:
    """The rollout as the new version has it."""
    if judged.after is not None:
        return judged.after
    if judged.outcome == "unrewarded":
        return judged.before
    if judged.failure is not None:
        return failed_rollout(judged.before, judged.failure, judged.reason, judged.detail)
    return failed_rollout(judged.before, FailureKind.DATA, "not_rebuilt", f"{judged.reason}: {judged.detail}")


def rescored_inputs(run: Run, name: str, iterations: Sequence[int]) -> Iterator[tuple[int, Reference]]:
    """The versions of a re-scored dataset that hold this run's iterations.

    Raises:
        StoreError: an iteration was not re-scored, or another collection of that name was.
    """
    for k in iterations:
        place = Location(run.config.store) / f"datasets/{name}/{run.run_id}-i{k:06d}"
        reference = Stage(place, kind=StageKind.COLLECT, run_id=run.run_id, iteration=k).reference()
        if reference is None:
            raise StoreError(
                f"{place.uri} is not there: iteration {k} of {run.run_id} was not re-scored into {name!r}. "
                f"roundhouse rescore {run.run_id} --iterations {k} --name {name}"
            )
        collected, judged = run.stage(k, StageKind.COLLECT).reference(), _first_judged(reference)
        if collected is not None and judged is not None:
            refuse_other_collection(judged, collected, "verdicts")
        yield k, reference


def _first_judged(version: Reference) -> Reference | None:
    """For verdicts on verdicts, return the version that judges the original collection; None if one of them is gone."""
    origin = read_manifest(version).inputs.get("rollouts")
    while origin is not None and origin.uri.split("/")[-3] == "datasets":
        if not Location(origin.uri).exists(MANIFEST):
            return None
        version, origin = origin, read_manifest(origin).inputs.get("rollouts")
    return version
