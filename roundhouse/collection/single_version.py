"""Collection of one policy version, which waits for no training step: the loop of `runner` at staleness 0.

Invariant: when `collect` returns, each rollout that was asked for is in the store with its turns, and `commit` makes exactly
these the stage's datasets, once each. When `collect` returns or raises, nothing of it is left at work, and what had finished
is on disk.

    specs ── one iteration of a plan ──> controller, at staleness 0 ──> runner: in this process, or by shards ──> rollouts

What earlier attempts at the stage finished is in the store, so that the controller needs no journal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from roundhouse.activity import Interrupted
from roundhouse.collection.bound import PlannedRollouts, StalenessBound
from roundhouse.collection.collector import Collected, Parts, Progress
from roundhouse.collection.controller import Controller
from roundhouse.collection.dispatch import ENGINE, Dispatch
from roundhouse.collection.events import Restarted
from roundhouse.collection.in_process_runner import InProcessRunner
from roundhouse.collection.runner import END_SECONDS, CollectAttempt, RolloutRunner
from roundhouse.config.models import RunConfig, Sampling
from roundhouse.config.rollout import Asynchrony, InProcessCollection
from roundhouse.errors import InfraError
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage


def begin_attempt(run: Run, stage: Stage, policy_version: int, oldest_version: int | None = None) -> CollectAttempt:
    """A new attempt at a stage, by what `rollout.distribution` names. `policy_version` is the one that is collected; where
    older ones may be too, those from `oldest_version` on."""
    if isinstance(run.config.rollout.distribution, InProcessCollection):
        return Parts(run.begin(stage, policy_version=policy_version), policy_version, oldest_version)
    from roundhouse.collection.sharded_attempt import ShardedAttempt

    return ShardedAttempt(run, stage, policy_version, oldest_version)


def runner_of(
    config: RunConfig, plan: PlannedRollouts, dispatch: Dispatch, engine_url: str, **options: Any
) -> RolloutRunner[Any, Any]:
    """The runner that `rollout.distribution` names; options as of `RolloutRunner`."""
    if isinstance(config.rollout.distribution, InProcessCollection):
        return InProcessRunner(config, plan, dispatch, engine_url, **options)
    from roundhouse.collection.shard_runner import ShardRunner

    return ShardRunner(config, plan, dispatch, engine_url, **options)


def planned(specs: Sequence[RolloutSpec], version: int) -> PlannedRollouts:
    """A plan whose one iteration, that trains from `version`, is these rollouts, each a group of its own."""
    bound = StalenessBound(
        Asynchrony(),
        groups=len(specs),
        group_size=1,
        iterations=version + 1,
        first_version=version,
        evaluates_first=False,
    )
    return PlannedRollouts(bound, lambda *_: specs)


class Collector:
    """Of one attempt at a stage; see the module's docstring."""

    def __init__(self, config: RunConfig, attempt: CollectAttempt, version: int) -> None:
        """`version` is the one that the engine holds."""
        self._config = config
        self._attempt = attempt
        self._version = version
        self.metrics, self.commit, self.whole = attempt.metrics, attempt.commit, attempt.whole

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        """Collect what is missing of `specs`; again for another round. `on_policy` as for `rollout.collector.collect`.

        Raises:
            InfraError: a shard lost more workers than `rollout.distribution.restarts`.
            StoreError: what finished cannot be written down.
        """
        version, plan = self._version, planned(specs, self._version)
        dispatch, there = Dispatch(Controller(plan.bound)), self._attempt.finished(specs)
        keys = zip(plan.keys(version + 1), specs, strict=True)
        finished = tuple((*key, version) for key, spec in keys if spec.rollout_id in there)
        dispatch.tell(Restarted(version, finished, ((ENGINE, version),)))
        runner = runner_of(self._config, plan, dispatch, engine_url, sampling=sampling, on_policy=on_policy)
        runner.start()
        try:
            opened = runner.open(version + 1, self._attempt, progress)
            is_whole = runner.wait(opened)
        except Interrupted:
            runner.interrupt()
            raise
        finally:
            _end(runner, version + 1)
        if not is_whole or runner.error is not None:
            raise runner.error or InfraError("The rollout runner has ended before the rollouts.")
        self._attempt.charge(runner.spend())
        return Collected(opened.settle(), opened.window_seconds)


def open_collector(run: Run, stage: Stage, policy_version: int) -> Collector:
    """A new attempt at a stage."""
    return Collector(run.config, begin_attempt(run, stage, policy_version), policy_version)


def _end(runner: RolloutRunner[Any, Any], iteration: int) -> None:
    """End a runner, which writes down what finished. To interrupt it again changes nothing."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            runner.stop()
            runner.close(iteration)
            return
        except Interrupted:
            if time.monotonic() > deadline:
                raise
