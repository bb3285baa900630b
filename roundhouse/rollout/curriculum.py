"""Tasks drawn by their recent difficulty: a weight for each task, and the order that the weights and the seed make of all.

Invariant: an order is a pure function of the tasks, what is recorded of them, the run's seed and the iteration. What counts as
recorded is decided by `recorded_draw`, from the store alone. No task comes twice in an order.

    success_band, band 0.2 … 0.8, falloff 0.2, outside_weight 0.05

    rate       0     0.1    0.2 … 0.8    0.9    1       no recent group
    weight    0.05   0.5        1        0.5   0.05     unseen_weight

A curriculum of your own is a class with `weights`, named by `rollout.curriculum: {kind: custom, target: file.py:Class}`:

    class EasyFirst(Curriculum):
        def weights(self, tasks, history):
            return [2.0 if mean_reward(history.get(task["task_id"], ())) > 0.5 else 1.0 for task in tasks]

Which iterations count is fixed before any rollout of the iteration that is drawn can begin, and never changes afterwards.
These are the last `rollout.curriculum.window` of those that the oldest policy version which may roll out the draw was trained
on; a version is published after the collect stage that it was trained on is complete. So a draw that is made again, after a
kill or on another machine, is the same, however far the training loop and the generation loop had come.

    staleness 0                      iteration 7 draws by iterations … 5 6
    rollouts begin 2 versions early  iteration 7 draws by iterations … 3 4      (start_lag 2)

What does not count: iterations whose training was skipped, failed and masked rollouts, branches of rollouts, and the iterations
of a fork's parent. The collect stages that count are inputs of the stage that is drawn.
"""

from __future__ import annotations

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from roundhouse.config.rollout import CurriculumConfig, CustomCurriculum, Epochs, SuccessBand
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import load_class
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, skip_of
from roundhouse.store.stage import StageKind, read_table
from roundhouse.trajectories.records import Status, derive_seed

TaskHistory = Mapping[str, Sequence[Sequence[float]]]
"""By task_id the rewards of its recorded groups, oldest first; only groups in which a rollout has a reward to train on."""


class Curriculum(ABC):
    """A rule from recorded rewards to weights."""

    @abstractmethod
    def weights(self, tasks: Sequence[TaskRow], history: TaskHistory) -> Sequence[float]:
        """The weight of each task: how often it is drawn relative to the others. 0: never. Pure."""

    def metrics(self, drawn: Sequence[TaskRow], history: TaskHistory) -> dict[str, float]:
        """What was drawn, by names that begin with `curriculum/`."""
        unseen = sum(task_id_of(task) not in history for task in drawn)
        return {"curriculum/unseen": unseen / len(drawn)}


class SuccessBandCurriculum(Curriculum):
    """Weight 1 in a band of success rates, falling off outside; see `SuccessBand`."""

    def __init__(self, config: SuccessBand) -> None:
        self._config = config

    def weights(self, tasks: Sequence[TaskRow], history: TaskHistory) -> Sequence[float]:
        known = {task_id: self._weight(self._rate(groups)) for task_id, groups in history.items()}
        return [known.get(task_id_of(task), self._config.unseen_weight) for task in tasks]

    def metrics(self, drawn: Sequence[TaskRow], history: TaskHistory) -> dict[str, float]:
        low, high = self._config.band
        rates = [self._rate(history[task_id_of(task)]) for task in drawn if task_id_of(task) in history]
        below, above = sum(rate < low for rate in rates), sum(rate > high for rate in rates)
        return super().metrics(drawn, history) | {
            "curriculum/below_band": below / len(drawn),
            "curriculum/in_band": (len(rates) - below - above) / len(drawn),
            "curriculum/above_band": above / len(drawn),
        }

    def _rate(self, groups: Sequence[Sequence[float]]) -> float:
        threshold = self._config.pass_threshold
        if threshold is None:
            return mean_reward(groups)
        return mean_reward([[float(reward >= threshold) for reward in group] for group in groups])

    def _weight(self, rate: float) -> float:
        low, high = self._config.band
        distance = max(low - rate, rate - high, 0.0)
        return max(
            1.0 - distance / self._config.falloff * (1.0 - self._config.outside_weight), self._config.outside_weight
        )


def mean_reward(groups: Sequence[Sequence[float]]) -> float:
    """Over all rollouts of the groups, rounded once, so that their order does not matter; 0 for none."""
    rewards = [reward for group in groups for reward in group]
    return math.fsum(rewards) / len(rewards) if rewards else 0.0


def build_curriculum(config: CurriculumConfig) -> Curriculum | None:
    """The curriculum of a section; None where tasks are drawn in epochs.

    Raises:
        ConfigError: a custom one cannot be imported or made.
    """
    if isinstance(config, Epochs):
        return None
    return _custom(config) if isinstance(config, CustomCurriculum) else SuccessBandCurriculum(config)


def _custom(config: CustomCurriculum) -> Curriculum:
    found: type[Curriculum] = load_class(config.target, Curriculum, "rollout.curriculum.target")
    try:
        return found(**config.parameters)
    except TypeError as error:
        raise ConfigError(
            f"rollout.curriculum.target is {config.target!r}: it cannot be made with rollout.curriculum.parameters "
            f"{config.parameters} ({error})."
        ) from error


def weighted_order(
    curriculum: Curriculum, tasks: Sequence[TaskRow], history: TaskHistory, seed: int, iteration: int
) -> list[TaskRow]:
    """All tasks with a weight above 0, as if drawn one after another by weight and not put back.

    Each has the key E / weight, E exponentially distributed, and the smallest key comes first (Efraimidis and Spirakis 2006,
    "Weighted random sampling with a reservoir").

    Raises:
        ConfigError: the weights are not one finite number of at least 0 for each task.
    """
    weights = curriculum.weights(tasks, history)
    if len(weights) != len(tasks):
        raise ConfigError(f"rollout.curriculum: {len(weights)} weights for {len(tasks)} tasks. Return one for each.")
    draws = random.Random(derive_seed(seed, "curriculum", iteration))
    keyed = []
    for place, (task, weight) in enumerate(zip(tasks, weights, strict=True)):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"rollout.curriculum: the weight of task {task_id_of(task)!r} is {weight}. Return finite numbers of at "
                "least 0."
            )
        exponential = -math.log1p(-draws.random())
        if weight > 0:
            keyed.append((exponential / weight, place))
    return [tasks[place] for _, place in sorted(keyed)]


def task_id_of(row: TaskRow) -> str:
    """
    Raises:
        DataError: the row has none, so that its groups could not be found again.
    """
    if not row.get("task_id"):
        raise DataError(
            "A task row has no task_id, and rollout.curriculum draws by what is recorded of each task. Add it."
        )
    return str(row["task_id"])


KEPT_STAGES = 512
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


@lru_cache(maxsize=KEPT_STAGES)
def _rewards(reference: str) -> list[tuple[str, tuple[float, ...]]]:
    """Task and rewards of each group of a collect stage, in the order in which they were written."""
    columns = ["group_id", "status", "reward", "task"]
    table = read_table(Reference.model_validate_json(reference), "rollouts")
    if "branched_from" in table.column_names:  # a branch begins where the task is partly done
        table = table.filter(table["branched_from"].is_null())
    tasks: dict[str, str] = {}
    rewards: dict[str, list[float]] = {}
    for group_id, status, reward, task in zip(*(table[name].to_pylist() for name in columns), strict=True):
        if status in (Status.COMPLETED, Status.TRUNCATED) and reward is not None:
            if group_id not in tasks:
                tasks[group_id] = task_id_of(json.loads(task))
            rewards.setdefault(group_id, []).append(reward)
    return [(tasks[group_id], tuple(values)) for group_id, values in rewards.items()]
