"""What the store records of the tasks that a run has rolled out, for the curriculum that draws the next ones.

Invariant: which iterations count is fixed before any rollout of the iteration that is drawn can begin, and never changes
afterwards. These are the last `rollout.curriculum.window` of those that the oldest policy version which may roll out the draw
was trained on; a version is published after the collect stage that it was trained on is complete. So a draw that is made again,
after a kill or on another machine, is the same, however far the training loop and the generation loop had come.

    staleness 0                      iteration 7 draws by iterations … 5 6
    rollouts begin 2 versions early  iteration 7 draws by iterations … 3 4      (start_lag 2)

What does not count: iterations whose training was skipped, failed and masked rollouts, and the iterations of a fork's parent.
The collect stages that count are inputs of the stage that is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from roundhouse.config.rollout import Epochs
from roundhouse.environments.base import TaskRow
from roundhouse.rollout.curriculum import Curriculum, TaskHistory, build_curriculum, task_id_of
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, skip_of
from roundhouse.store.stage import StageKind, read_table
from roundhouse.trajectories.records import Status

KEPT = 512
"""Collect stages whose rewards are kept in memory."""


@dataclass(frozen=True)
class RecordedDraw:
    """What the tasks of an iteration are drawn by."""

    curriculum: Curriculum | None = None
    """None: in epochs, by nothing that is recorded."""
    history: TaskHistory = field(default_factory=dict)
    inputs: dict[str, Reference] = field(default_factory=dict)
    """The collect stages that count, as `drawn_by_<iteration>`."""

    def metrics(self, drawn: Sequence[TaskRow]) -> dict[str, float]:
        """What was drawn; empty without a curriculum."""
        return {} if self.curriculum is None else self.curriculum.metrics(drawn, self.history)


def recorded_draw(run: Run, version: int) -> RecordedDraw:
    """What is drawn by where rollouts may begin on this policy version.

    Raises:
        ConfigError: the curriculum cannot be imported or made.
        StoreError: a collect stage that counts is damaged.
    """
    config = run.config.rollout.curriculum
    if isinstance(config, Epochs):
        return RecordedDraw()
    first = max(run.first_version, version - config.window) + 1
    inputs = {
        f"drawn_by_{iteration}": reference
        for iteration in range(first, version + 1)
        if (reference := run.stage(iteration, StageKind.COLLECT).reference()) is not None
        and skip_of(run, iteration) is None
    }
    history: dict[str, list[tuple[float, ...]]] = {}
    for reference in inputs.values():
        for task_id, rewards in _rewards(reference.model_dump_json()):
            history.setdefault(task_id, []).append(rewards)
    return RecordedDraw(build_curriculum(config), history, inputs)


@lru_cache(maxsize=KEPT)
def _rewards(reference: str) -> list[tuple[str, tuple[float, ...]]]:
    """Task and rewards of each group of a collect stage, in the order in which they were written."""
    columns = ["group_id", "status", "reward", "task"]
    table = read_table(Reference.model_validate_json(reference), "rollouts").select(columns)
    tasks: dict[str, str] = {}
    rewards: dict[str, list[float]] = {}
    for group_id, status, reward, task in zip(*(table[name].to_pylist() for name in columns), strict=True):
        if status in (Status.COMPLETED, Status.TRUNCATED) and reward is not None:
            if group_id not in tasks:
                tasks[group_id] = task_id_of(json.loads(task))
            rewards.setdefault(group_id, []).append(reward)
    return [(tasks[group_id], tuple(values)) for group_id, values in rewards.items()]
