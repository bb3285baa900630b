"""A run's plan in the controller's terms: group positions and sample numbers, and their rollouts.

Invariant: a pure function of the configuration, the environment's tasks and, with `rollout.curriculum`, the stored
iterations that were trained on before any rollout of the planned one may start. Iteration k owns the positions (k - 1)
* groups … k * groups - 1 in the order of its tasks, as in the synchronous collect stage. With
`rollout.dynamic_sampling` these are the positions of all rounds that the iteration may draw, round after round.

    2 tasks an iteration, group size 2:   2/1  ->  iteration 2, its first task, sample 1
    the same, 3 rounds at most:           2/1  ->  iteration 1, the first task of its second round, sample 1

With a window, a step trains on groups of several iterations, so group names include the iteration: `<task_id>@2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from roundhouse.collection.pool import PlannedRollouts, StalenessBound
from roundhouse.environments.base import TaskRow
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import (
    RecordedDraw,
    RolloutSpec,
    Sampled,
    plan_rollouts,
    recorded_draw,
    round_tasks,
    sample_rounds,
)
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, StageKind
from roundhouse.trajectories.records import Rollout

KEPT = 16
"""Number of rounds with cached plans."""


def bound_of(run: Run) -> StalenessBound:
    """Return the staleness bound of the run's controller. Version 0, or a fork's first one, is evaluated before the
    plan begins."""
    config, sampling = run.config, run.config.rollout.dynamic_sampling
    return StalenessBound(
        config.asynchrony,
        groups=config.rollout.prompts_per_iteration,
        group_size=config.rollout.group_size,
        iterations=config.iterations,
        validate_every=config.evaluation.every or 0,
        first_version=run.first_version,
        evaluates_first=False,
        rounds=1 if sampling is None else sampling.max_rounds,
    )


def generated_in(run: Run, iteration: int) -> Stage:
    """Return the stage that holds an iteration's rollouts: `collect`, or with a window `generate`, from which a step's
    collect stage copies its groups."""
    return run.stage(iteration, StageKind.GENERATE if run.config.asynchrony.window > 1 else StageKind.COLLECT)


class Plan(PlannedRollouts):
    """See the module's docstring."""

    def __init__(self, run: Run, tasks: Sequence[TaskRow] | None = None) -> None:
        """`tasks`: the training tasks; unset, all of the environment."""
        self._run = run
        self._config = config = run.config
        self._tasks = open_environment(config.environment).tasks("train") if tasks is None else tasks
        self.draw_of = lru_cache(maxsize=KEPT)(self._draw_of)
        """Recorded rewards for an iteration's draw; read when its rollouts may start."""
        super().__init__(bound_of(run), lru_cache(maxsize=KEPT)(self._specs))

    def sample(self, iteration: int, roll_out: Callable[[list[RolloutSpec]], list[Rollout]]) -> Sampled:
        """Roll out an iteration's tasks, in as many rounds as it takes (`roundhouse.rollout.plan.sample_rounds`)."""
        config, history = self._config, self.draw_of(iteration).history
        return sample_rounds(
            self._tasks,
            config.rollout,
            config.seed,
            iteration,
            roll_out,
            history,
            named_by_iteration=self.bound.chooses,
            first_draw=self._run.first_draw,
        )

    def draw_metrics(self, iteration: int) -> dict[str, float]:
        """Return the metrics of an iteration's draw."""
        return self.draw_of(iteration).metrics([spec.row for spec in self.specs(iteration) if spec.sample == 0])

    def _draw_of(self, iteration: int) -> RecordedDraw:
        return recorded_draw(self._run, iteration - 1 - self.bound.start_lag)

    def _specs(self, iteration: int, number: int = 1) -> tuple[RolloutSpec, ...]:
        rollout, seed, history = self._config.rollout, self._config.seed, self.draw_of(iteration).history
        rows = [
            row
            for each in range(1, number + 1)
            for row in round_tasks(
                self._tasks, rollout, seed, iteration, each, history, first_draw=self._run.first_draw
            )
        ]
        planned = plan_rollouts(
            rows,
            rollout.group_size,
            seed,
            iteration,
            named_by_iteration=self.bound.chooses,
            tasks=self._tasks,
        )
        return tuple(planned[-rollout.prompts_per_iteration * rollout.group_size :])
