"""Validate: from rollouts to training sequences and a quarantine (`roundhouse.trajectories.validation`).

Invariant: what is judged is what lies in the store. The proofs themselves are pure; here stand the facts that they are
held against: the plan's limits, the counts written down beside the turns, and the policy's tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.config.models import RunConfig
from roundhouse.errors import DataError, TooFewSequences
from roundhouse.stages.cost import rollout_waste
from roundhouse.stages.policy import engine_files
from roundhouse.stages.text_proof import DecodedText
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, StageKind, read_manifest, read_table
from roundhouse.trajectories.ledger import prove_counted
from roundhouse.trajectories.proofs import CollectionLimits, Recorded
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables
from roundhouse.trajectories.validation import Validated, validate

NO_SPREAD, SURPLUS = "no_spread", "surplus_group"
"""Reasons of rollouts that dynamic sampling put aside. Nothing is wrong with them: they do not count as refused."""


OWN_RECORD = ("agent", "worker")
"""Kinds of environment whose rollouts are recorded by their agent's or worker's own loop, under limits of its own."""


def in_plan_order(rollouts: list[Rollout]) -> list[Rollout]:
    """By group and sample. They were written as they finished, and training must not depend on who was first."""
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))


def groups_left_out(rollouts: list[Rollout], sampling: dict[str, Any] | None) -> dict[str, str]:
    """Why each group that dynamic sampling (its entry in the collect stage's manifest) did not keep is not trained on."""
    if not sampling or not sampling["kept"]:
        return {}
    kept, surplus = set(sampling["kept"]), set(sampling["surplus"])
    groups = {rollout.group_id for rollout in rollouts} - kept
    return {group: SURPLUS if group in surplus else NO_SPREAD for group in groups}


def limits_of(config: RunConfig, vocabulary_size: int, policy_version: int) -> CollectionLimits:
    """What the iteration was collected under. Limits of a model call are known only where our loops made the calls."""
    ours = config.environment.kind not in OWN_RECORD
    return CollectionLimits(
        vocabulary_size=vocabulary_size,
        policy_version=policy_version,
        max_age=config.asynchrony.staleness,
        group_size=config.rollout.group_size,
        max_new_tokens=config.generation.sampling.max_new_tokens if ours else None,
        max_turns=config.rollout.max_turns if ours else None,
    )


def recorded_counts(rollouts: pa.Table, turns: pa.Table) -> dict[str, Recorded]:
    """What the `rollouts` dataset says of the turns of each rollout.

    Raises:
        DataError: turns belong to no rollout.
    """
    columns = [
        rollouts.column(name).to_pylist() for name in ("rollout_id", "turns", "generated_tokens", "total_tokens")
    ]
    counts = {name: Recorded(*found) for name, *found in zip(*columns, strict=True)}
    if strays := set(pc.unique(turns.column("rollout_id")).to_pylist()) - set(counts):
        raise DataError(
            f"The turns dataset has turns of {len(strays)} rollouts that the rollouts dataset has not, such as {min(strays)}. "
            "It is not what the collect stage wrote; collect the iteration again."
        )
    return counts


def text_proof(run: Run) -> DecodedText | None:
    """What holds messages against tokens; None where it is turned off, the record is not ours, or there is no policy with a
    tokenizer.json."""
    config = run.config
    if (
        not config.validation.check_text
        or config.environment.kind in OWN_RECORD
        or run.checkpoint(0).reference() is None
    ):
        return None
    files = engine_files(run)
    if not (files / "tokenizer.json").is_file():
        return None
    return DecodedText(files, hermes=config.generation.tool_call_parser == "hermes")


def validate_iteration(run: Run, iteration: int, rollouts: Reference, vocabulary_size: int) -> Reference:
    """Validate the rollouts of an iteration.

    Raises:
        LedgerError: the rollouts are not those that the collect stage counted.
        TooFewSequences: more was refused than `validation.max_quarantine_fraction` allows, or too few groups are left.
    """
    stage = run.stage(iteration, StageKind.VALIDATE)
    if (done := stage.reference()) is not None:
        return done
    tables = read_table(rollouts, "rollouts"), read_table(rollouts, "turns")
    collected = in_plan_order(rollouts_from_tables(*tables))
    prove_counted(rollouts.counts, collected)
    left_out = groups_left_out(collected, read_manifest(rollouts).details.get("dynamic_sampling"))
    terms = limits_of(run.config, vocabulary_size, rollouts.policy_version)
    return _validated(run, stage, {"rollouts": rollouts}, collected, tables, terms, left_out, {})


def validate_groups(
    run: Run, iteration: int, dataset: Reference, groups: Collection[str], vocabulary_size: int, where: dict[str, Any]
) -> Reference:
    """Validate some groups of a dataset that was collected outside the run, for an iteration that collects nothing.

    Its limits of a model call are not known here: its collection may have had others than the run.

    Args:
        where: what these groups are, for the manifest.

    Raises:
        TooFewSequences: as of `validate_iteration`.
    """
    stage = run.stage(iteration, StageKind.VALIDATE)
    if (done := stage.reference()) is not None:
        return done
    tables = rows_of_groups(dataset, groups)
    collected = in_plan_order(rollouts_from_tables(*tables))
    terms = CollectionLimits(vocabulary_size, dataset.policy_version)
    return _validated(run, stage, {"dataset": dataset}, collected, tables, terms, {}, {"offline": where})


def rows_of_groups(dataset: Reference, groups: Collection[str]) -> tuple[pa.Table, pa.Table]:
    """The rows of these groups in the tables `rollouts` and `turns`."""
    rollouts, turns = read_table(dataset, "rollouts"), read_table(dataset, "turns")
    rollouts = rollouts.filter(pc.is_in(rollouts["group_id"], value_set=pa.array(list(groups), pa.string())))
    return rollouts, turns.filter(pc.is_in(turns["rollout_id"], value_set=rollouts["rollout_id"].combine_chunks()))


def _validated(
    run: Run,
    stage: Stage,
    inputs: dict[str, Reference],
    collected: list[Rollout],
    tables: tuple[pa.Table, pa.Table],
    terms: CollectionLimits,
    left_out: dict[str, str],
    details: dict[str, Any],
) -> Reference:
    config = run.config
    attempt = run.begin(stage, policy_version=terms.policy_version)
    result = validate(
        collected,
        config.validation,
        vocabulary_size=terms.vocabulary_size,
        policy_version=terms.policy_version,
        left_out=left_out,
        terms=terms,
        recorded=recorded_counts(*tables),
        text=text_proof(run),
    )
    attempt.write_table("sequences", result.sequences)
    attempt.write_table("quarantine", result.quarantine)
    refused = _refuse_too_few(result, config, f"iteration {stage.iteration}", stage.location.uri)
    return attempt.commit(
        inputs=inputs,
        counts=result.ledger.counts() | {"sequences": result.sequences.num_rows, "quarantined": refused},
        metrics={
            "validate/sequences": result.sequences.num_rows,
            "validate/quarantined": refused,
            "validate/filtered": _filtered(result),
            "validate/text_proved": result.text_proved,
            "validate/tokens": pc.sum(pc.list_value_length(result.sequences.column("token_ids"))).as_py(),
            "validate/trained_tokens": pc.sum(
                pc.list_flatten(result.sequences.column("loss_mask")).cast(pa.int64())
            ).as_py(),
            **rollout_waste(collected, result.quarantine),
        },
        details={"reasons": result.reasons, "failures": result.ledger.failures} | details,
    )


def _refuse_too_few(result: Validated, config: RunConfig, what: str, place: str) -> int:
    """How many rollouts were refused.

    Raises:
        TooFewSequences: more than `validation.max_quarantine_fraction`, or fewer groups are left than `failures.min_groups`.
    """
    filtered = _filtered(result)
    refused, requested = result.quarantine.num_rows - filtered, result.ledger.requested - filtered
    groups = pc.count_distinct(result.sequences.column("group_id")).as_py()
    if refused > config.validation.max_quarantine_fraction * requested or groups < config.failures.min_groups:
        raise TooFewSequences(
            f"{what}: {refused} of {requested} rollouts were refused ({result.reasons}), "
            f"{result.sequences.num_rows} sequences of {groups} groups are left; validation.max_quarantine_fraction is "
            f"{config.validation.max_quarantine_fraction}, failures.min_groups {config.failures.min_groups}. The evidence is "
            f"in {place} (dataset quarantine)."
        )
    return refused


def _filtered(result: Validated) -> int:
    """Rollouts that nothing is wrong with, which are not wanted."""
    return sum(result.reasons.get(reason, 0) for reason in (NO_SPREAD, SURPLUS))
