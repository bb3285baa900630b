"""What became of every requested rollout, in numbers.

Invariant, checked whenever a ledger is made: `requested = completed + truncated + failed + masked + omitted`, and the
failures by code add up to `failed`. A ledger that does not balance cannot exist.

    >>> Ledger.from_outcomes([Status.COMPLETED, Status.FAILED], ["", "tool_timeout"]).counts()["failed"]
    1

The functions hold a ledger against the rows that it counts: when a stage is read, before it is trained on, and in
`store verify`. For every iteration:

    requested = completed + truncated + failed + masked + omitted              of collect and of validate
    the `rollouts` dataset has these rows by status, each id once              collect, evaluate
    no row without a rewarded status has a reward                              collect, evaluate
    validate has as many requested and failed as collect                       between the two
    the rollouts of `sequences` are those completed and truncated              validate, and again before training

The last one is why a reward of a failed rollout cannot reach a weight: a sequence of it would be one rollout too many.

Tokens: every generated token of an iteration's training rollouts is either trained on or wasted for exactly one reason,
recorded by the stage that knows it:

    generated = trained on + failed + quarantined + omitted + untrained

    failed        its rollout has no reward                                             validate
    quarantined   validation refused its rollout                                        validate
    omitted       its group was too small, or more was collected than was wanted        validate
    untrained     the algorithm gave its sequences no weight: a group without spread    train
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.store.location import Location
from roundhouse.store.manifest import Manifest
from roundhouse.store.stage import StageKind, parse_parquet, read_manifest
from roundhouse.trajectories.records import Rollout, Status


class LedgerError(RoundhouseError):
    """Rollouts were lost or counted twice."""


class Ledger(BaseModel):
    """Counts of rollouts by outcome."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requested: NonNegativeInt
    completed: NonNegativeInt = 0
    truncated: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    masked: NonNegativeInt = 0
    omitted: NonNegativeInt = 0
    failures: dict[str, NonNegativeInt] = {}
    """Failed rollouts by failure code."""

    def model_post_init(self, _context: object) -> None:
        self.balanced()

    def balanced(self) -> Ledger:
        """This ledger.

        Raises:
            LedgerError: the numbers do not add up; the text names them.
        """
        outcomes = {status.value: getattr(self, status.value) for status in Status}
        if self.requested != sum(outcomes.values()):
            parts = " + ".join(f"{name} {count}" for name, count in outcomes.items())
            raise LedgerError(
                f"The ledger does not balance: requested {self.requested}, but {parts} = {sum(outcomes.values())}. "
                "Rollouts were lost or counted twice; do not train on this dataset, collect it again."
            )
        if self.failed != sum(self.failures.values()):
            raise LedgerError(
                f"The ledger does not balance: failed {self.failed}, but its failures by code are {self.failures}, "
                f"together {sum(self.failures.values())}."
            )
        return self

    @classmethod
    def from_outcomes(
        cls, outcomes: Sequence[Status], failure_codes: Sequence[str], requested: int | None = None
    ) -> Ledger:
        """The ledger of `outcomes`; `failure_codes` are parallel to them and count where the outcome is failed.

        Raises:
            LedgerError: `requested` (by default as many as there are outcomes) is not the number of outcomes.
        """
        counts = Counter(status.value for status in outcomes)
        pairs = zip(outcomes, failure_codes, strict=True)
        failures = Counter(code for status, code in pairs if status is Status.FAILED)
        asked = len(outcomes) if requested is None else requested
        return cls(requested=asked, failures=dict(sorted(failures.items())), **counts)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], requested: int | None = None) -> Ledger:
        """The ledger of finished rollouts; give `requested` to have it proved that none is missing."""
        codes = [rollout.failure_code for rollout in rollouts]
        return cls.from_outcomes([rollout.status for rollout in rollouts], codes, requested)

    def counts(self) -> dict[str, int]:
        """`requested` and the outcomes, without the failure codes."""
        return {name: getattr(self, name) for name in ("requested", *(status.value for status in Status))}


COUNTED = (StageKind.COLLECT, StageKind.EVALUATE, StageKind.VALIDATE)
"""Stages whose manifest holds a ledger."""


def ledger_of(manifest: Manifest) -> Ledger:
    """The ledger of a stage.

    Raises:
        LedgerError: it does not balance.
    """
    counts = {name: manifest.counts.get(name, 0) for name in ("requested", *(status.value for status in Status))}
    failures = manifest.details.get("failures", {})
    return Ledger(**counts, failures=failures)


def prove_counted(counts: Mapping[str, int], rollouts: Sequence[Rollout]) -> None:
    """The rollouts are those that their stage counted.

    Raises:
        LedgerError: more, fewer, or with other outcomes.
    """
    if "requested" not in counts:
        return  # a dataset that was imported and never counted
    found = Ledger.from_rollouts(rollouts, requested=counts["requested"]).counts()
    other = {name: (counts.get(name, 0), count) for name, count in found.items() if counts.get(name, 0) != count}
    if other:
        differences = ", ".join(f"{name} {before} counted, {now} there" for name, (before, now) in other.items())
        raise LedgerError(f"The rollouts are not those of their ledger: {differences}. Collect the iteration again.")


def prove_trainable(counts: Mapping[str, int], sequences: pa.Table) -> None:
    """The sequences come from as many rollouts as validation let pass, and each has a reward.

    Raises:
        LedgerError: one more, such as of a failed rollout, or one fewer.
    """
    if "requested" not in counts:
        return
    if (what := _untrainable(counts, sequences)) is not None:
        raise LedgerError(f"{what}. Nothing was trained; validate the iteration again.")


def ledger_faults(location: Location, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the ledger of a complete stage, in words."""
    if manifest.kind not in COUNTED or "requested" not in manifest.counts:
        return
    try:
        ledger_of(manifest)
    except LedgerError as error:
        yield str(error)
        return
    if manifest.kind == StageKind.VALIDATE:
        yield from _validated_faults(location, manifest)
    else:
        rows = _columns(location, manifest, "rollouts", ["rollout_id", "status", "reward"])
        ids, statuses = rows.column("rollout_id").to_pylist(), Counter(rows.column("status").to_pylist())
        for name in (status.value for status in Status):
            if statuses[name] != manifest.counts.get(name, 0):
                yield f"the ledger says {manifest.counts.get(name, 0)} {name}, the rollouts dataset has {statuses[name]}"
        if len(set(ids)) != len(ids):
            yield f"{len(ids) - len(set(ids))} rollouts stand in it more than once"
        unrewarded = pa.array([status.value for status in Status if not status.rewarded])
        planted = rows.filter(pc.and_(pc.is_in(rows.column("status"), unrewarded), pc.is_valid(rows.column("reward"))))
        if planted.num_rows:
            yield f"{planted.num_rows} rollouts that failed have a reward, such as {planted.column('rollout_id')[0].as_py()}"


def _validated_faults(location: Location, manifest: Manifest) -> Iterator[str]:
    if (
        what := _untrainable(manifest.counts, _columns(location, manifest, "sequences", ["rollout_id", "reward"]))
    ) is not None:
        yield what
    source = manifest.inputs.get("rollouts")
    if source is None:
        return
    try:
        collected = read_manifest(source).counts
    except StoreError:
        return  # reported as a reference that leads to nothing
    for name in ("requested", "failed"):
        if collected.get(name, 0) != manifest.counts.get(name, 0):
            yield f"{name}: {collected.get(name, 0)} were collected, {manifest.counts.get(name, 0)} are accounted for"


def _untrainable(counts: Mapping[str, int], sequences: pa.Table) -> str | None:
    rollouts = pc.count_distinct(sequences.column("rollout_id")).as_py()
    passed = counts.get("completed", 0) + counts.get("truncated", 0)
    if rollouts != passed:
        return f"the sequences come from {rollouts} rollouts, but {passed} were completed or truncated and let pass"
    nothing = sequences.column("reward").null_count
    return f"{nothing} sequences have no reward" if nothing else None


def _columns(location: Location, manifest: Manifest, dataset: str, names: list[str]) -> pa.Table:
    parts: Iterable[str] = (entry.path for entry in manifest.files if entry.path.startswith(f"{dataset}-"))
    tables = [parse_parquet(location.read(path), names) for path in parts]
    schema = {"reward": pa.float64()}
    empty = pa.table({name: pa.array([], schema.get(name, pa.string())) for name in names})
    return pa.concat_tables(tables) if tables else empty


def rollout_waste(rollouts: Sequence[Rollout], quarantine: pa.Table) -> dict[str, float]:
    """Tokens of rollouts that will not be trained on, for validation's manifest."""
    outcomes = dict(zip(quarantine["rollout_id"].to_pylist(), quarantine["outcome"].to_pylist(), strict=True))
    wasted = {"failed": 0, "quarantined": 0, "omitted": 0}
    generated = 0
    for rollout in rollouts:
        tokens = rollout.generated_tokens
        generated += tokens
        outcome = outcomes.get(rollout.rollout_id)
        if rollout.status is Status.FAILED:
            wasted["failed"] += tokens
        elif outcome is not None:
            wasted["omitted" if outcome == Status.OMITTED else "quarantined"] += tokens
    return {
        "cost/generated_tokens": float(generated),
        "cost/repeated_rollouts": float(sum(rollout.attempt > 1 for rollout in rollouts)),
        **{f"waste/{reason}_tokens": float(count) for reason, count in wasted.items()},
    }


def untrained_tokens(sequences: pa.Table, columns: pa.Table) -> float:
    """Generated tokens of the sequences that a step was given and gave no weight."""
    idle = columns.filter(pc.invert(columns["trained"]))["sequence_id"]
    masks = sequences.filter(pc.is_in(sequences["sequence_id"], value_set=idle.combine_chunks()))["loss_mask"]
    return float(pc.sum(pc.list_flatten(masks).cast(pa.int64())).as_py() or 0)
