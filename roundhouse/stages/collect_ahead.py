"""Collect and refit of an overlapped run: an iteration's rollouts, made by the generation lane beside training.

Invariants: the collect stage of iteration k holds exactly the rollouts that the synchronous one would make, once each, under
the same seeds; none has a token older than version k-1 - `asynchrony.staleness`. It is committed after the controller's
journal has what became of each. `inputs` names the checkpoint of every version that generated. CPU seconds of the generation
lane are those of the stage that is committed next, and no other's (`roundhouse.store.cpu`).
"""

from __future__ import annotations

from collections import Counter

from roundhouse.asynchrony.resumption import oldest_version
from roundhouse.asynchrony.rolling import OpenCollection, Progress, Rolling
from roundhouse.stages.collect import Collected, refuse_many_failures
from roundhouse.stages.parts import Parts
from roundhouse.stages.refit import ensure_version, refit_iteration
from roundhouse.store.cpu import beside
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import Rollout


def collect_ahead(run: Run, iteration: int, rolling: Rolling, progress: Progress | None = None) -> Reference | None:
    """The collect stage of an iteration; None when the lane was ended before, which loses nothing that is on disk.

    Raises:
        TooFewRollouts: more failed than `rollout.max_failed_fraction`; the next attempt rolls these out again.
    """
    stage = run.stage(iteration, "collect")
    if (done := stage.reference()) is not None:
        return done
    trains_from = iteration - 1
    oldest = max(run.first_version, trains_from - run.config.asynchrony.staleness)
    with beside():
        parts = Parts(run.begin(stage, policy_version=trains_from), trains_from, oldest)
        opened = rolling.open(iteration, parts, progress)
        try:
            if not rolling.wait(opened):
                return None
            refuse_many_failures(list(opened.rollouts.values()), run.config.rollout, rolling.url)
            rolling.flush()
        finally:
            rolling.close(iteration)
        parts.attempt.charge(rolling.spend())
        return _commit(run, opened, [opened.rollouts[key] for key in rolling.plan.keys(iteration)])


def transfer(run: Run, checkpoint: Reference) -> None:
    """Bring the engine to a version; the first time it stands as the refit stage of the iteration that trains from it."""
    iteration = checkpoint.policy_version + 1
    with beside():
        if run.stage(iteration, "refit").reference() is None:
            refit_iteration(run, iteration, checkpoint)
        else:
            ensure_version(run, checkpoint)


def _commit(run: Run, opened: OpenCollection, rollouts: list[Rollout]) -> Reference:
    collected = Collected(rollouts, opened.window_seconds)
    ledger = Ledger.from_rollouts(rollouts, requested=opened.planned)
    versions = {turn.policy_version for rollout in rollouts for turn in rollout.turns}
    checkpoints = {version: run.checkpoint(version).reference() for version in sorted(versions)}
    ages = Counter(opened.iteration - 1 - oldest_version(rollout) for rollout in rollouts if rollout.turns)
    return opened.parts.commit(
        inputs={f"weights_{version}": found for version, found in checkpoints.items() if found is not None},
        counts=ledger.counts(),
        metrics=collected.metrics() | opened.parts.journal.resumptions.metrics(),
        details={
            "failures": ledger.failures,
            "sampling": run.config.generation.sampling.model_dump(),
            "policy_versions": sorted(versions),
            "rollouts_by_age": {str(age): count for age, count in sorted(ages.items())},
        },
    )
