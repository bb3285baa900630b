"""The collect stage of an overlapped run whose rollouts are made by shards (`rollout.distribution`).

Invariants: those of `collect_ahead`; the manifest tells each shard, and what became of lost workers, as that of a distributed
collection does.
"""

from __future__ import annotations

from roundhouse.asynchrony.rolling import Progress
from roundhouse.asynchrony.rolling_shards import OpenShards, RollingShards
from roundhouse.stages.collect import Collected, refuse_many_failures
from roundhouse.stages.collect_ahead import generated_by, weights_of
from roundhouse.stages.sharded_attempt import ShardedAttempt
from roundhouse.store.cpu import beside
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.trajectories.ledger import Ledger


def collect_shards_ahead(
    run: Run, iteration: int, rolling: RollingShards, progress: Progress | None = None
) -> Reference | None:
    """The collect stage of an iteration; None when the lane was ended before, which loses nothing that is on disk.

    Raises:
        TooFewRollouts: more failed than `rollout.max_failed_fraction`; the next attempt rolls these out again.
        InfraError: a shard lost more workers than `rollout.distribution.restarts`.
    """
    stage = run.stage(iteration, "collect")
    if (done := stage.reference()) is not None:
        return done
    trains_from = iteration - 1
    oldest = max(run.first_version, trains_from - run.config.asynchrony.staleness)
    with beside():
        attempt = ShardedAttempt(run, stage, trains_from, oldest)
        opened = rolling.open(iteration, attempt, progress)
        try:
            if not rolling.wait(opened):
                return None
            made = [rollout for outcome in opened.outcomes.values() for rollout in outcome.rollouts]
            refuse_many_failures(made, run.config.rollout, rolling.url)
            rolling.flush()
        finally:
            rolling.close(iteration)
        attempt.charge(opened.cpu_seconds + rolling.spend())
        return _commit(run, opened)


def _commit(run: Run, opened: OpenShards) -> Reference:
    attempt, outcomes = opened.attempt, [opened.outcomes[each.label] for each in opened.shards]
    attempt.take(outcomes)
    rollouts = [rollout for outcome in outcomes for rollout in outcome.rollouts]
    ledger = Ledger.from_rollouts(rollouts, requested=opened.planned)
    return attempt.commit(
        inputs=weights_of(run, rollouts),
        counts=ledger.counts(),
        metrics=Collected(rollouts, opened.window_seconds).metrics() | attempt.metrics(),
        details=generated_by(run, opened.iteration, rollouts, ledger),
    )
