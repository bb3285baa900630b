"""An iteration's rollouts in an overlapped run, made by shards (`rollout.distribution`).

Invariants: those of `collect_ahead`; the manifest tells each shard, and what became of lost workers, as that of a distributed
collection does.
"""

from __future__ import annotations

from roundhouse.collection.in_process_runner import Progress
from roundhouse.collection.plan import generated_in
from roundhouse.collection.recovery import by_id
from roundhouse.collection.shard_runner import OpenShards, ShardRunner
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.stages.collect import Collected, refuse_many_failures
from roundhouse.stages.prefetch import generated_by, weights_of
from roundhouse.store.cpu_accounting import attribute_to_this_stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout


def prefetch_shards(
    run: Run, iteration: int, runner: ShardRunner, progress: Progress | None = None
) -> Reference | None:
    """The stage of an iteration's own rollouts; None when the loop was ended before, which loses nothing that is on disk.

    Raises:
        TooFewRollouts: more failed than `rollout.max_failed_fraction`; the next attempt rolls these out again.
        InfraError: a shard lost more workers than `rollout.distribution.restarts`.
    """
    stage, chooses = generated_in(run, iteration), run.config.asynchrony.window > 1
    if (done := stage.reference()) is not None:
        return done
    trains_from = iteration - 1
    oldest = max(
        run.first_version, trains_from - run.config.asynchrony.start_lag(run.config.rollout.prompts_per_iteration)
    )
    with attribute_to_this_stage():
        attempt = ShardedAttempt(run, stage, trains_from, oldest)
        opened = runner.open(iteration, attempt, progress)
        try:
            if not runner.wait(opened):
                return None
            if not chooses:  # else when a step is decided on
                made = [rollout for outcome in opened.outcomes.values() for rollout in outcome.rollouts]
                refuse_many_failures(made, run.config.rollout, runner.url)
            runner.flush()
        finally:
            runner.close(iteration)
        attempt.charge(opened.cpu_seconds + (0.0 if chooses else runner.spend()))
        return _commit(run, opened, _outcomes(stage, opened))


def _outcomes(stage: Stage, opened: OpenShards) -> list[ShardOutcome]:
    """In the order of the shards. One without has groups that were dropped before it was whole: what there is of it."""
    written: dict[str, Rollout] | None = None
    found = []
    for each in opened.shards:
        if (outcome := opened.outcomes.get(each.label)) is None:
            written = written or by_id(stage)
            outcome = opened.attempt.taken_over(each.shard, written, is_settled=True)
        if outcome is not None:
            found.append(outcome)
    return found


def _commit(run: Run, opened: OpenShards, outcomes: list[ShardOutcome]) -> Reference:
    attempt = opened.attempt
    attempt.take(outcomes)
    rollouts = [rollout for outcome in outcomes for rollout in outcome.rollouts]
    requested = len(rollouts) if run.config.asynchrony.window > 1 else opened.planned
    ledger = Ledger.from_rollouts(rollouts, requested=requested)
    return attempt.commit(
        inputs=weights_of(run, rollouts),
        counts=ledger.counts(),
        metrics=Collected(rollouts, opened.window_seconds).metrics() | attempt.metrics(),
        details=generated_by(run, opened.iteration, rollouts, ledger),
    )
