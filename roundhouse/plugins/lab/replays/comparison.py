"""Compare a replayed stage with the recorded one: rows, weights, metrics, counts; the first difference and its cause.

Invariant: only a stage's results are compared: clocks, places and attempts are ignored. Rows are equal if their files
have one digest, or, if a library writes other bytes, if every value is equal.

Also: the drift of a policy from the recorded rollouts that it is trained on, and the gate that stops a replay. Its
numbers cover the sequences' trained tokens under the step's initial weights.

    w     importance weight, exp(policy − recorded log-probability)
    Kish  (Σw)² / (n Σw²), the effective share of n samples
    KL    of the generating policy from the training one, by k3 (Schulman): mean of w − 1 − log w
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from roundhouse.config.loading import differences
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.stages.freshness import drift
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import Manifest, ModelFiles, Reference, StageKind, read_manifest, read_table
from roundhouse.trajectories.records import Status

MEASURED = re.compile(r"time/|.*(seconds|per_second|mfu|memory|cpu|flops)")
"""Metrics of how fast something was, which differ between any two runs."""
KEYS = {
    "sequences": ("sequence_id",),
    "quarantine": ("rollout_id",),
    "rollouts": ("rollout_id",),
    "turns": ("rollout_id", "turn"),
}
"""Key columns of a dataset's rows; rows of other datasets are compared by position."""
READS: dict[str, tuple[str, ...]] = {
    StageKind.COLLECT: ("environment", "rollout", "generation", "asynchrony", "seed", "policy"),
    StageKind.VALIDATE: (
        "validation",
        "rollout",
        "generation",
        "asynchrony",
        "failures",
        "environment.kind",
        "offline",
    ),
    StageKind.TRAIN: ("train", "generation.sampling", "validation", "asynchrony", "offline", "seed"),
    StageKind.EVALUATE: ("evaluation", "environment", "rollout", "generation"),
}
"""Sections and keys of the configuration that a stage reads."""


@dataclass(slots=True)
class StageComparison:
    """One stage, as it was and as it is."""

    iteration: int
    stage: str
    outcome: str
    """equal, differs, or distribution: samples of an engine, which cannot be equal and are compared by their means."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By dataset that differs: rows before and after, rows changed, the columns in which."""
    weights: list[str] = field(default_factory=list)
    """Files of the new version with other weights."""
    metrics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """(before, after) of each that differs."""
    counts: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    distribution: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """For samples: both means by quantity, and their distance in standard errors."""
    because: list[str] = field(default_factory=list)
    """Why it differs: a key, an input, the code."""
    drift: dict[str, Any] | None = None
    """Drift of a train stage (`roundhouse.plugins.lab.replays.comparison`)."""


@dataclass(slots=True)
class Comparison:
    """A replay compared with its original."""

    uri: str
    request: dict[str, Any]
    """The replayed stages and their substitutions."""
    changed: dict[str, tuple[Any, Any]]
    """Keys of the configuration, (recorded, replayed)."""
    stages: list[StageComparison] = field(default_factory=list)
    first: StageComparison | None = None
    """The first stage that differs; None when all are equal."""
    stopped: dict[str, Any] | None = None
    """Iteration and reasons, if the drift gate stopped the replay."""

    @classmethod
    def begin(cls, location: Location, original: Run, config: RunConfig, request: dict[str, Any]) -> Comparison:
        return cls(location.uri, request, differences(original.config, config))

    @property
    def equal(self) -> bool:
        return all(stage.outcome != "differs" for stage in self.stages)

    @property
    def substituted(self) -> bool:
        """Return whether anything but the code may differ."""
        return bool(self.request["set"] or self.request["inputs"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_stage(
    comparison: Comparison, recorded: Reference, again: Reference, *, by_distribution: bool
) -> StageComparison:
    """Compare a stage; `comparison` holds the stages before it."""
    before, after = read_manifest(recorded), read_manifest(again)
    stage_comparison = StageComparison(before.iteration, before.kind, "equal")
    if by_distribution:
        stage_comparison.outcome = "distribution"
        stage_comparison.distribution = _distribution(recorded, again)
        return stage_comparison
    stage_comparison.rows = _rows(recorded, again, before, after)
    if before.kind == StageKind.TRAIN:
        files = [ModelFiles.written_by(manifest).weights() for manifest in (before, after)]
        digests = [{name: entry.sha256 for name, entry in own.items()} for own in files]
        stage_comparison.weights = sorted(_pairs(digests[0], digests[1]))
    stage_comparison.metrics = {
        name: pair for name, pair in _pairs(before.metrics, after.metrics).items() if not MEASURED.match(name)
    }
    stage_comparison.counts = _pairs(before.counts, after.counts)
    if stage_comparison.rows or stage_comparison.weights or stage_comparison.metrics or stage_comparison.counts:
        stage_comparison.outcome = "differs"
        stage_comparison.because = _causes(comparison, before, after)
    return stage_comparison


def first_difference(comparison: Comparison) -> StageComparison | None:
    """The first stage that differs, in the order of the run."""
    return next((stage for stage in comparison.stages if stage.outcome == "differs"), None)


def _causes(comparison: Comparison, before: Manifest, after: Manifest) -> list[str]:
    """Everything that the stage depends on and that is not as it was."""
    causes = []
    for name, reference in after.inputs.items():
        if (recorded := before.inputs.get(name)) is None or recorded.kind != reference.kind:
            causes.append(f"input {name}: {reference.uri}")
        elif name in comparison.request["inputs"]:
            causes.append(f"input {name}: {comparison.request['inputs'][name]} was substituted for {recorded.uri}")
        elif reference != recorded:
            # The stage of this replay that made it. A version is made by the train stage of its iteration
            kind = StageKind.TRAIN if reference.kind == StageKind.CHECKPOINT else reference.kind
            difference = (reference.iteration, str(kind), "differs")
            differs = any((stage.iteration, stage.stage, stage.outcome) == difference for stage in comparison.stages)
            causes += [f"input {name}: iteration {reference.iteration}, {kind} differs"] if differs else []
    for key, (old, new) in comparison.changed.items():
        if any(key == part or key.startswith(f"{part}.") for part in READS[before.kind]):
            causes.append(f"configuration: {key} {old!r} -> {new!r}")
    if causes:
        return causes
    old, new = before.provenance.code_version, after.provenance.code_version
    if old != new:
        return [f"code: {old} -> {new}"]
    return ["nothing that is recorded: another device, number of threads or version of a library"]


def _rows(recorded: Reference, again: Reference, before: Manifest, after: Manifest) -> dict[str, dict[str, Any]]:
    digests = [_digests(manifest) for manifest in (before, after)]
    result: dict[str, dict[str, Any]] = {}
    for dataset in sorted(digests[0].keys() | digests[1].keys()):
        if digests[0].get(dataset) == digests[1].get(dataset):
            continue
        present = [dataset in each for each in digests]
        tables = [read_table(each, dataset) for each, has in zip((recorded, again), present, strict=True) if has]
        if not all(present):
            sizes = [0 if not has else tables[0].num_rows for has in present]
            if any(sizes):
                result[dataset] = {"before": sizes[0], "after": sizes[1], "changed": 0, "columns": []}
            continue
        if (difference := _table_difference(tables[0], tables[1], KEYS.get(dataset, ()))) is not None:
            result[dataset] = difference
    return result


def _digests(manifest: Manifest) -> dict[str, list[str]]:
    """By dataset, the digests of its parts. A part is called `<dataset>-a<attempt>-<part>.parquet`."""
    digests: dict[str, list[str]] = {}
    for entry in manifest.files:
        if (name := re.match(r"([a-z_]+)-a\d{4}.*\.parquet", entry.path)) is not None:
            digests.setdefault(name[1], []).append(entry.sha256)
    return digests


def _table_difference(before: pa.Table, after: pa.Table, keys: Sequence[str]) -> dict[str, Any] | None:
    """None when every value is equal."""
    names = [name for name in before.column_names if name in after.column_names]
    other = sorted(set(before.column_names) ^ set(after.column_names))
    rows = [
        {tuple(row[key] for key in keys) if keys else place: row for place, row in enumerate(rows)}
        for rows in (table.select(names).to_pylist() for table in (before, after))
    ]
    shared = [key for key in rows[0] if key in rows[1]]
    columns: set[str] = set()
    changed = 0
    for key in shared:
        differing = {name for name in names if not _same(rows[0][key][name], rows[1][key][name])}
        columns |= differing
        changed += bool(differing)
    if not changed and not other and rows[0].keys() == rows[1].keys():
        return None
    return {
        "before": before.num_rows,
        "after": after.num_rows,
        "changed": changed,
        "columns": [name for name in names if name in columns] + other,
    }


def _same(one: Any, other: Any) -> bool:
    return one == other or (
        isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    )


def _pairs(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if not _same(before.get(name), after.get(name))}


def _distribution(recorded: Reference, again: Reference) -> dict[str, dict[str, float | None]]:
    """Return both means of reward and length, and their distance in standard errors; None if neither sample varies. The
    rewards of masked rollouts do not count."""
    columns = ["status", "reward", "generated_tokens", "turns"]
    tables = [read_table(reference, "rollouts").select(columns).to_pylist() for reference in (recorded, again)]
    result: dict[str, dict[str, float | None]] = {}
    for name in columns[1:]:
        samples = [
            [row[name] for row in rows if row[name] is not None and (name != "reward" or Status(row["status"]).counted)]
            for rows in tables
        ]
        if not all(samples):
            continue
        means = [math.fsum(values) / len(values) for values in samples]
        spread = [
            math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1) / len(values)
            for values, mean in zip(samples, means, strict=True)
        ]
        error = math.sqrt(math.fsum(spread))
        distance = (means[1] - means[0]) / error if error > 0 else None if means[0] != means[1] else 0.0
        result[name] = {"before": means[0], "after": means[1], "standard_errors": distance}
    return result


@dataclass(frozen=True, slots=True)
class Drift:
    """Drift of one iteration."""

    effective_tokens: float
    """Kish of the tokens' weights, in (0, 1]."""
    effective_rollouts: float
    """Kish of the rollouts' weights, each the product over its tokens."""
    clipped: float
    """Share of the tokens with a weight outside of `train.algorithm.mismatch_bounds`."""
    kl: float
    """Nats a token."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DriftGate:
    """The bounds beyond which a replay stops; the first three are those of `offline` in a configuration."""

    min_effective_tokens: float = 0.5
    min_effective_rollouts: float = 0.05
    max_clipped: float = 0.3
    max_kl: float = 0.1

    @classmethod
    def parse(cls, bounds: list[str]) -> DriftGate:
        """Parse `max_kl=0.2` and the like; other bounds keep their defaults.

        Raises:
            ConfigError: the bound is unknown, or its value is not a number.
        """
        values = {}
        for bound in bounds:
            key, _, value = bound.partition("=")
            try:
                if key not in cls.__dataclass_fields__:
                    raise ValueError
                values[key] = float(value)
            except ValueError:
                known = ", ".join(cls.__dataclass_fields__)
                raise ConfigError(f"--gate {bound}: give {known} with a number, such as max_kl=0.2.") from None
        return cls(**values)

    def judge(self, found: Drift) -> list[str]:
        """Return one line per exceeded bound; empty if the data still fits the policy."""
        lines = []
        for key, value, beyond in (
            ("min_effective_tokens", found.effective_tokens, found.effective_tokens < self.min_effective_tokens),
            (
                "min_effective_rollouts",
                found.effective_rollouts,
                found.effective_rollouts < self.min_effective_rollouts,
            ),
            ("max_clipped", found.clipped, found.clipped > self.max_clipped),
            ("max_kl", found.kl, not found.kl <= self.max_kl),  # NaN, too
        ):
            if beyond:
                lines.append(f"{key.split('_', 1)[1]} is {value:.4g} ({key}={getattr(self, key):g})")
        return lines


def drift_of(config: RunConfig, sequences: Reference, train: Reference) -> Drift | None:
    """Return the drift of a complete train stage; None if it trained on no token."""
    measured = drift(config, read_table(sequences, "sequences"), read_table(train, "columns"))
    if measured is None:
        return None
    # over the tokens with a weight, as the trainer computes it
    kl = read_manifest(train).metrics.get("train/gen_kl_error", 0.0)
    return Drift(measured.effective_tokens, measured.effective_rollouts, measured.clipped, kl)
