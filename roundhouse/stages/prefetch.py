"""Collect and refit of an overlapped run: the generation loop makes an iteration's rollouts concurrently with training.

Invariants: an iteration's rollouts equal those of the synchronous stage, once each, with the same seeds. No token that
step k trains on is older than version k-1 - `asynchrony.staleness`. A stage is committed after the controller's journal
has each rollout's outcome. `inputs` names the checkpoint of every generating version and the records of the task draw.
CPU seconds of the generation loop are charged to the next committed collect stage only (`roundhouse.cpu`).

    own groups:     collect 3                        the rollouts of iteration 3
    with a window:  generate 3, generate 4, …        the rollouts of each, committed when steps were chosen for all of them
                    collect 3                        of these, the groups that step 3 trains on
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

from roundhouse.collection.asynchronous.overlap import StepBatch
from roundhouse.collection.asynchronous.plan import Plan, generated_in
from roundhouse.collection.collector import Collected, metrics_by_environment, refuse_many_failures, written_rollouts
from roundhouse.collection.in_process_runner import begin_attempt
from roundhouse.collection.runner import OpenIteration, Progress, RolloutRunner, oldest_version
from roundhouse.cpu import attribute_to_this_stage
from roundhouse.errors import StoreError
from roundhouse.launch.base import Stopped
from roundhouse.rollout.plan import RolloutSpec, Sampled
from roundhouse.stages.refit import ensure_version, refit_iteration
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference, StageKind, read_manifest
from roundhouse.trajectories.records import Ledger, Rollout
from roundhouse.trajectories.schemas import rollouts_table, turns_table


def prefetch_rollouts(
    run: Run, iteration: int, runner: RolloutRunner[Any, Any], progress: Progress | None = None
) -> Reference | None:
    """The stage of an iteration's own rollouts; None when the runner was ended before, which loses nothing that is on disk.

    Raises:
        TooFewRollouts, FailingRollouts: more failed than `rollout.max_failed_fraction`; the next attempt rolls these out again.
        TooFewSequences: too few groups have spread after the last round (`rollout.dynamic_sampling`).
        InfraError: a shard lost more workers than `rollout.distribution.restarts`.
    """
    config, stage = run.config, generated_in(run, iteration)
    if (reference := stage.reference()) is not None:
        return reference
    chooses = config.asynchrony.window > 1
    oldest = max(run.first_version, iteration - 1 - config.asynchrony.start_lag(config.rollout.prompts_per_iteration))
    with attribute_to_this_stage():
        attempt = begin_attempt(run, stage, iteration - 1, oldest)  # the version that its step trains from
        opened = runner.open(iteration, attempt, progress)
        try:
            if (sampled := _in_rounds(run, runner, opened)) is None:
                return None
            runner.flush()
        finally:
            runner.close(iteration)
        opened.attempt.charge(0.0 if chooses else runner.spend())
        rollouts = opened.settle()
        ledger = Ledger.from_rollouts(rollouts, requested=len(rollouts) if chooses else opened.planned)
        return opened.attempt.commit(
            inputs=_weights_of(run, rollouts) | _plan_of(runner).draw_of(iteration).inputs,
            counts=ledger.counts(),
            metrics=Collected(rollouts, opened.window_seconds).metrics()
            | metrics_by_environment(config, rollouts, "mixture/")
            | opened.attempt.metrics()
            | sampled.metrics()
            | _plan_of(runner).draw_of(iteration).metrics(sampled.tasks),
            details=_generated_by(run, iteration, rollouts, ledger) | sampled.details(),
        )


def _in_rounds(run: Run, runner: RolloutRunner[Any, Any], opened: OpenIteration) -> Sampled | None:
    """One round of an open iteration, or under dynamic sampling as many as it takes; None when the runner was ended before.

    Raises:
        TooFewRollouts, FailingRollouts: more rollouts of a round failed than `rollout.max_failed_fraction`.
        TooFewSequences: as of `roundhouse.rollout.plan.sample_rounds`.
    """
    numbers, chooses = count(1), run.config.asynchrony.window > 1

    def roll_out(specs: list[RolloutSpec]) -> list[Rollout]:
        runner.begin_round(opened, next(numbers))
        if not runner.wait(opened):
            raise Stopped
        runner.flush()  # an abandoned attempt keeps finished rollouts
        ids = {spec.rollout_id for spec in specs}
        rollouts = [rollout for rollout in opened.made() if rollout.rollout_id in ids]
        if not chooses:  # else when a step is decided on
            refuse_many_failures(rollouts, run.config.rollout, runner.url)
        return rollouts

    try:
        sampled = _plan_of(runner).sample(opened.iteration, roll_out)
    except Stopped:
        return None
    runner.end_rounds(opened, sampled.rounds)
    return sampled


def collect_chosen(run: Run, iteration: int, runner: RolloutRunner[Any, Any], batch: StepBatch) -> Reference:
    """Make the collect stage of a step with chosen groups: a copy of their rollouts.

    Raises:
        StoreError: the stage exists with other groups, or rollouts of these are missing.
    """
    stage = run.stage(iteration, StageKind.COLLECT)
    if (reference := stage.reference()) is not None:
        if batch.groups and (stored_groups := read_manifest(reference).details["groups"]) != list(batch.groups):
            raise StoreError(
                f"{reference.uri} holds the groups {stored_groups}, and step {iteration} is of {batch.groups}. Fork the run."
            )
        return reference
    attempt = run.begin(stage, policy_version=iteration - 1)
    groups, plan = dict(batch.at_hand), _plan_of(runner)
    missing = {position for position in batch.groups if position not in groups}
    for origin in {plan.iteration_of(position) for position in missing}:
        groups |= _written(run, plan, origin, missing & set(plan.groups(origin)))
    rollouts = [rollout for position in batch.groups for rollout in groups[position]]
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    attempt.charge(runner.spend())
    ledger = Ledger.from_rollouts(rollouts, requested=len(batch.groups) * run.config.rollout.group_size)
    return attempt.commit(
        inputs=_weights_of(run, rollouts),
        counts=ledger.counts(),
        metrics=Collected(rollouts, batch.window_seconds).metrics()
        | metrics_by_environment(run.config, rollouts, "mixture/")
        | plan.draw_metrics(iteration),
        details=_generated_by(run, iteration, rollouts, ledger) | {"groups": list(batch.groups)},
    )


def transfer(run: Run, checkpoint: Reference) -> None:
    """Bring the engine to a version; the first time it is recorded as the refit stage of the iteration that trains from it."""
    iteration = checkpoint.policy_version + 1
    with attribute_to_this_stage():
        if run.stage(iteration, StageKind.REFIT).reference() is None:
            refit_iteration(run, iteration, checkpoint)
        else:
            ensure_version(run, checkpoint)


def _written(run: Run, plan: Plan, iteration: int, positions: set[int]) -> dict[int, list[Rollout]]:
    """Groups of an iteration, from the store."""
    place = generated_in(run, iteration).location
    keys = [key for position in positions for key in plan.samples(position)]
    for _ in range(2):  # a worker that puts its parts together may delete one between listing and reading, once
        keyed = plan.keyed(iteration, written_rollouts(place))
        if not (lost := [plan.spec(key).rollout_id for key in keys if key not in keyed]):
            return {position: [keyed[key] for key in plan.samples(position)] for position in positions}
    raise StoreError(
        f"{place.uri} has lost {', '.join(lost)}, of a group that a step was decided on. Restore its files, or fork the run."
    )


def _plan_of(runner: RolloutRunner[Any, Any]) -> Plan:
    assert isinstance(runner.plan, Plan), "an overlapped run rolls out its own plan"
    return runner.plan


def _weights_of(run: Run, rollouts: list[Rollout]) -> dict[str, Reference]:
    """The checkpoint of every version that generated, unless it was deleted."""
    versions = {turn.policy_version for rollout in rollouts for turn in rollout.turns}
    references = {version: run.checkpoint(version).reference() for version in sorted(versions)}
    return {f"weights_{version}": reference for version, reference in references.items() if reference is not None}


def _generated_by(run: Run, iteration: int, rollouts: list[Rollout], ledger: Ledger) -> dict[str, Any]:
    ages = Counter(iteration - 1 - oldest_version(rollout) for rollout in rollouts if rollout.turns)
    return {
        "failures": ledger.failures,
        "sampling": run.config.generation.sampling.model_dump(),
        "policy_versions": sorted({turn.policy_version for rollout in rollouts for turn in rollout.turns}),
        "rollouts_by_age": {str(age): count for age, count in sorted(ages.items())},
    }
