"""A run's plan, as the controller counts it: positions of groups and numbers of samples, and the rollouts they stand for.

Invariant: a pure function of the configuration, the environment's tasks and, with `rollout.curriculum`, of what the store holds
of the iterations that were trained on before any rollout of the planned one may begin. Iteration k's own groups are the
positions (k - 1) * groups … k * groups - 1, in the order of its tasks, the same that the synchronous collect stage rolls out.

    2 tasks an iteration, group size 2:   2/1  ->  iteration 2, its first task, sample 1

With a window, a step trains on groups of several iterations, so these are called by their iteration, too: `<task_id>@2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from roundhouse.collection.asynchronous.bound import StalenessBound
from roundhouse.collection.asynchronous.pool import Key
from roundhouse.environments.base import TaskRow
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.curriculum import RecordedDraw, recorded_draw
from roundhouse.rollout.plan import RolloutSpec, plan_rollouts, round_tasks
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, StageKind
from roundhouse.trajectories.records import Rollout

KEPT = 16
"""Iterations whose plan is kept in memory."""


def bound_of(run: Run) -> StalenessBound:
    """What the run's controller is held to. Version 0, or a fork's first, is evaluated before the plan begins."""
    config = run.config
    return StalenessBound(
        config.asynchrony,
        groups=config.rollout.prompts_per_iteration,
        group_size=config.rollout.group_size,
        iterations=config.iterations,
        validate_every=config.evaluation.every or 0,
        first_version=run.first_version,
        evaluates_first=False,
    )


def generated_in(run: Run, iteration: int) -> Stage:
    """The stage where an iteration's own rollouts are written: `collect`, or with a window `generate`, from which the collect
    stage of a step takes the groups that it trains on."""
    return run.stage(iteration, StageKind.GENERATE if run.config.asynchrony.window > 1 else StageKind.COLLECT)


class Plan:
    """See the module's docstring."""

    def __init__(self, run: Run, tasks: Sequence[TaskRow] | None = None) -> None:
        """`tasks`: the training tasks; unset, all of the environment."""
        self._run = run
        self._config = config = run.config
        self._tasks = open_environment(config.environment).tasks("train") if tasks is None else tasks
        self.draw_of = lru_cache(maxsize=KEPT)(self._draw_of)
        """What the tasks of an iteration are drawn by; asked for when its rollouts may begin."""
        self.specs = lru_cache(maxsize=KEPT)(self._specs)
        """The rollouts of an iteration, groups in order, samples in order."""

    def iteration_of(self, position: int) -> int:
        return position // self._config.rollout.prompts_per_iteration + 1

    def groups(self, iteration: int) -> tuple[int, ...]:
        """The positions of an iteration's own groups."""
        first = (iteration - 1) * self._config.rollout.prompts_per_iteration
        return tuple(range(first, first + self._config.rollout.prompts_per_iteration))

    def samples(self, position: int) -> Iterator[Key]:
        """The rollouts of a group."""
        return ((position, sample) for sample in range(self._config.rollout.group_size))

    def spec(self, key: Key) -> RolloutSpec:
        """The spec of a rollout of the controller's."""
        groups, size = self._config.rollout.prompts_per_iteration, self._config.rollout.group_size
        return self.specs(self.iteration_of(key[0]))[key[0] % groups * size + key[1]]

    def keys(self, iteration: int) -> Iterator[Key]:
        """The rollouts of an iteration as the controller calls them, in the order of `specs`."""
        for position in self.groups(iteration):
            yield from self.samples(position)

    def keyed(self, iteration: int, rollouts: Iterable[Rollout]) -> dict[Key, Rollout]:
        """Rollouts of an iteration by their key; what is not of the plan is left out."""
        found = {rollout.rollout_id: rollout for rollout in rollouts}
        pairs = zip(self.keys(iteration), self.specs(iteration), strict=True)
        return {key: found[spec.rollout_id] for key, spec in pairs if spec.rollout_id in found}

    def _draw_of(self, iteration: int) -> RecordedDraw:
        oldest = iteration - 1 - self._config.asynchrony.start_lag(self._config.rollout.prompts_per_iteration)
        return recorded_draw(self._run, oldest)

    def draw_metrics(self, iteration: int) -> dict[str, float]:
        """What an iteration's curriculum drew."""
        return self.draw_of(iteration).metrics([spec.row for spec in self.specs(iteration) if spec.sample == 0])

    def _specs(self, iteration: int) -> tuple[RolloutSpec, ...]:
        rollout = self._config.rollout
        rows = round_tasks(self._tasks, rollout, self._config.seed, iteration, 1, self.draw_of(iteration).history)
        mixed = self._config.asynchrony.window > 1
        return tuple(plan_rollouts(rows, rollout.group_size, self._config.seed, iteration, named_by_iteration=mixed))
