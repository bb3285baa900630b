"""Plan of an iteration's rollouts: its tasks, the rollouts of each, rounds of dynamic sampling, and curricula.

Invariants: a plan is a pure function of rows, group size, run seed and iteration, so a resumed run makes the same plan on any
machine. Rollout IDs are unique. A rollout's seed depends only on run seed, iteration, group and sample. Consecutive
iterations walk through epochs, each a shuffle of all tasks (or their order); no task repeats within an epoch. With
`drop_last`, an epoch ends before a remainder smaller than an iteration, so that each iteration belongs to one epoch.

    rows a b, group size 2        ->  a/0 a/1 b/0 b/1
    rows a b c, 2 per iteration   ->  c a | b · a | b c      (· begins epoch 1)

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) draws rounds of tasks until enough groups have spread. A round's tasks
depend only on (run seed, iteration, round). All rounds belong to one collect stage, so a resumed attempt repeats the rounds
and generates only missing rollouts. All rollouts are recorded; validation omits surplus groups.

A curriculum replaces epochs: it orders tasks by weights from their recorded rewards (`Curriculum.weights`). `recorded_draw`
reads these records; docs/curriculum.md has the rules of selection.
"""

from __future__ import annotations

import json
import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from roundhouse import plugins
from roundhouse.activity import ACTIVITY
from roundhouse.config.models import RolloutConfig
from roundhouse.config.rollout import CurriculumConfig, CustomCurriculum, Epochs, RecentRewards, SuccessBand
from roundhouse.environments.base import TaskRow
from roundhouse.environments.task_ids import unused_id
from roundhouse.errors import ConfigError, DataError, RoundhouseError, TooFewSequences
from roundhouse.imports import load_class
from roundhouse.store.run import Run, skip_of
from roundhouse.store.stage import Reference, StageKind, read_table
from roundhouse.trajectories.records import Rollout, Status, derive_seed, groups_with_spread
from roundhouse.trajectories.storable import storable_text
from roundhouse.user_code import lock_limit

ROW_PROBLEM = "row_problem"
"""Field of a planned row that cannot be played, with the reason."""
TaskHistory = Mapping[str, Sequence[Sequence[float]]]
"""Rewards of the recorded groups by task_id, oldest first. Groups without a reward to train on are omitted."""


class Curriculum(ABC):
    """A rule from recorded rewards to weights."""

    @abstractmethod
    def weights(self, tasks: Sequence[TaskRow], history: TaskHistory) -> Sequence[float]:
        """Return the weight of each task: its draw frequency relative to the others (0: never). Must be pure."""

    def metrics(self, drawn: Sequence[TaskRow], history: TaskHistory) -> dict[str, float]:
        """Return the draw's metrics; names begin with `curriculum/`."""
        unseen = sum(task_id_of(task) not in history for task in drawn)
        return {"curriculum/unseen": unseen / len(drawn)}


class SuccessBandCurriculum(Curriculum):
    """Weight 1 in a band of success rates, less outside; see `SuccessBand`."""

    def __init__(self, config: SuccessBand) -> None:
        self._config = config

    def weights(self, tasks: Sequence[TaskRow], history: TaskHistory) -> Sequence[float]:
        low, high = self._config.band
        falloff, outside = self._config.falloff, self._config.outside_weight
        known: dict[str, float] = {}
        for task_id, groups in history.items():
            rate = self._rate(groups)
            distance = max(low - rate, rate - high, 0.0)
            known[task_id] = max(1.0 - distance / falloff * (1.0 - outside), outside)
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


def mean_reward(groups: Sequence[Sequence[float]]) -> float:
    """Return the mean over all rollouts of the groups, 0 without rollouts. It is rounded once, so their order does not
    matter."""
    rewards = [reward for group in groups for reward in group]
    return math.fsum(rewards) / len(rewards) if rewards else 0.0


def build_curriculum(config: CurriculumConfig) -> Curriculum | None:
    """Build the curriculum of a section; None if tasks are drawn in epochs.

    Raises:
        ConfigError: a custom curriculum cannot be imported or made.
    """
    curriculum: Curriculum | None = plugins.factory("curriculum", config.kind)(config)
    if curriculum is None or isinstance(curriculum, Curriculum):
        return curriculum
    raise ConfigError(
        f"rollout.curriculum.kind is {config.kind}, but its plug-in returns a {type(curriculum).__name__}, not a Curriculum "
        f"(roundhouse.rollout.plan). Correct the plug-in."
    )


def draw_epochs(config: Epochs) -> None:
    """Return no curriculum: tasks are drawn in epochs."""


def load_custom(config: CustomCurriculum) -> Curriculum:
    """Create a curriculum from a custom class.

    Raises:
        ConfigError: the class cannot be imported or created.
    """
    curriculum_class: type[Curriculum] = load_class(config.target, Curriculum, "rollout.curriculum.target")
    try:
        return curriculum_class(**config.parameters)
    except TypeError as error:
        raise ConfigError(
            f"rollout.curriculum.target is {config.target!r}: it cannot be made with rollout.curriculum.parameters "
            f"{config.parameters} ({error})."
        ) from error


def weighted_order(
    curriculum: Curriculum, tasks: Sequence[TaskRow], history: TaskHistory, seed: int, iteration: int
) -> list[TaskRow]:
    """Return all tasks with a weight above 0, drawn by weight without replacement.

    Each task has the key E / weight, with E exponentially distributed, and the smallest key comes first (Efraimidis and
    Spirakis 2006, "Weighted random sampling with a reservoir").

    Raises:
        ConfigError: the weights are not one finite number of at least 0 for each task.
    """
    with ACTIVITY.track("rollout.curriculum", "weights"), lock_limit():
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
    """Return the row's task_id.

    Raises:
        DataError: task_id is missing, so its groups could not be found again.
    """
    if row.get("task_id") in (None, ""):
        raise DataError(
            "A task row has no task_id, and rollout.curriculum draws by the recorded outcomes of each task. Add it."
        )
    return str(row["task_id"])


KEPT_STAGES = 512
"""Number of collect stages with rewards cached in memory."""


@dataclass(frozen=True)
class RecordedDraw:
    """Recorded rewards that decide an iteration's draw."""

    curriculum: Curriculum | None = None
    """None: draw in epochs, without records."""
    history: TaskHistory = field(default_factory=dict)
    inputs: dict[str, Reference] = field(default_factory=dict)
    """The collect stages of the records, as `drawn_by_<iteration>`."""

    def metrics(self, drawn: Sequence[TaskRow]) -> dict[str, float]:
        """Return the draw's metrics; empty without a curriculum."""
        return {} if self.curriculum is None else self.curriculum.metrics(drawn, self.history)


def recorded_draw(run: Run, version: int) -> RecordedDraw:
    """Read the recorded rewards for a draw; its rollouts may start on this policy version.

    Raises:
        ConfigError: the curriculum cannot be imported or created.
        StoreError: a required collect stage is damaged.
    """
    config = run.config.rollout.curriculum
    if not isinstance(config, RecentRewards):
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
    """Return task and rewards of each group of a collect stage, in the order of writing."""
    columns = ["group_id", "status", "reward", "task"]
    table = read_table(Reference.model_validate_json(reference), "rollouts")
    if "branched_from" in table.column_names:  # a branch starts in the middle of a task
        table = table.filter(table["branched_from"].is_null())
    tasks: dict[str, str] = {}
    rewards: dict[str, list[float]] = {}
    for group_id, status, reward, task in zip(*(table[name].to_pylist() for name in columns), strict=True):
        if Status(status).counted and reward is not None:
            if group_id not in tasks:
                tasks[group_id] = task_id_of(json.loads(task))
            rewards.setdefault(group_id, []).append(reward)
    return [(tasks[group_id], tuple(values)) for group_id, values in rewards.items()]


T = TypeVar("T")

NOTHING: TaskHistory = MappingProxyType({})
"""No task has a recorded group."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One rollout to make."""

    group_id: str
    sample: int
    row: TaskRow
    seed: int
    branch: BranchPoint | None = None
    """None: the rollout starts from its task."""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.sample}"


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Turn at which a branch leaves its source rollout."""

    rollout: Rollout
    """The source, with its items and turns."""
    turn: int
    """The first turn that is sampled again."""


def branch_spec(rollout: Rollout, turn: int, sample: int, taken: Container[str] = ()) -> RolloutSpec:
    """Return branch `sample` of a rollout's turn. The branches of one turn are a group: `calc/7/0@2` for turn 2 of `calc/7/0`.

    Args:
        taken: ids of other groups, which this group must avoid.
    """
    seed = derive_seed(rollout.seed, "branch", turn, sample)
    group_id = unused_id(f"{rollout.rollout_id}@{turn}", taken)
    return RolloutSpec(group_id, sample, rollout.task, seed, BranchPoint(rollout, turn))


class ReorderError(RoundhouseError):
    """Results do not match the plan one to one."""


def plan_rollouts(
    rows: Sequence[TaskRow],
    group_size: int,
    seed: int,
    iteration: int,
    *,
    named_by_iteration: bool = False,
    tasks: Sequence[TaskRow] | None = None,
) -> list[RolloutSpec]:
    """Return `group_size` specs per row. A repeated task becomes a separate group, `<task_id>#2`.

    Args:
        named_by_iteration: name groups `<task_id>@<iteration>`, for datasets with groups of several iterations. Seeds
            do not change.
        tasks: all tasks of the draw; generated names must avoid their IDs. By default the rows.

    Raises:
        DataError: the task_id of a row is missing.
    """
    specs = []
    times: dict[str, int] = {}
    taken: set[str] | None = None
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"Task row {index} is a {type(row).__name__}; a task row is an object with a task_id.")
        if (task_id := _task_id(row)) == "":
            raise DataError(f"Task row {index} has no task_id: rollouts of different tasks could not be distinguished.")
        group_id, times[task_id] = task_id, times.get(task_id, 0) + 1
        if times[task_id] > 1:
            if taken is None:
                taken = {str(each.get("task_id")) for each in (rows if tasks is None else tasks)}
            group_id = unused_id(f"{task_id}#{times[task_id]}", taken)
        name = f"{group_id}@{iteration}" if named_by_iteration else group_id
        row = _planned_row(row, task_id)
        for sample in range(group_size):
            specs.append(RolloutSpec(name, sample, row, derive_seed(seed, iteration, group_id, sample)))
    return specs


def _task_id(row: TaskRow) -> str:
    task_id = row.get("task_id")
    return "" if task_id is None else storable_text(str(task_id))


def _planned_row(row: TaskRow, task_id: str) -> TaskRow:
    """Return the row with storable texts. Replace a row that is not JSON with a row that fails its rollouts."""
    try:
        if names := [name for name in row if not isinstance(name, str)]:
            raise TypeError(f"the key {names[0]!r} is not a text")
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"task_id": task_id, ROW_PROBLEM: f"The task row is not JSON: {error}."}
    storable = storable_text(text)
    return row if storable == text else json.loads(storable)


def reorder(results: Iterable[tuple[int, T]], count: int) -> list[T]:
    """Return results in plan order, given by plan index.

    Raises:
        ReorderError: indexes are missing, duplicate, outside 0..count-1 or not integers; the message names all of them.
    """
    results_by_index: dict[int, T] = {}
    duplicate, outside = set(), set()
    no_index: list[Any] = []
    for index, result in results:
        if type(index) is not int:
            no_index.append(index)
        elif not 0 <= index < count:
            outside.add(index)
        elif index in results_by_index:
            duplicate.add(index)
        else:
            results_by_index[index] = result
    missing = [index for index in range(count) if index not in results_by_index]
    if missing or duplicate or outside or no_index:
        named = f", no whole number {no_index}" if no_index else ""
        raise ReorderError(
            f"Results do not match the plan of {count} rollouts: missing {missing}, duplicate {sorted(duplicate)}, "
            f"out of range {sorted(outside)}{named}."
        )
    return [results_by_index[index] for index in range(count)]


class WeightedTasks(Sequence[TaskRow]):
    """Tasks of a mixture's environments, drawn by weight.

    Invariant: the environment at a position depends only on the weights and the position (Weyl sequence of the golden
    ratio), so every range of positions has nearly the weighted shares. Each environment walks through separate epochs.
    """

    def __init__(self, tasks: Mapping[str, Sequence[TaskRow]], weights: Mapping[str, float]) -> None:
        self.tasks, self.weights = tasks, weights
        total, reached = sum(weights.values()), 0.0
        bounds: list[float] = []
        for name in tasks:
            reached += weights[name] / total
            bounds.append(reached)
        self._bounds = tuple(bounds[:-1])  # positions above all bounds belong to the last environment

    def names(self, begin: int, end: int) -> list[str]:
        """Return the environments of the positions from `begin` to before `end`."""
        known = list(self.tasks)
        return [known[bisect_right(self._bounds, place * GOLDEN % 1.0)] for place in range(begin, end)]

    def counts(self, end: int) -> dict[str, int]:
        """Count the positions before `end` per environment."""
        below = [0, *_weyl_below(self._bounds, end), end]
        return {name: after - before for name, (before, after) in zip(self.tasks, pairwise(below), strict=True)}

    def __len__(self) -> int:
        return sum(map(len, self.tasks.values()))

    def __iter__(self) -> Iterator[TaskRow]:
        return chain.from_iterable(self.tasks.values())

    def __getitem__(self, index: Any) -> Any:
        return [row for rows in self.tasks.values() for row in rows][index]


GOLDEN = (5**0.5 - 1) / 2
BLOCK = 2**16
"""Number of positions counted at once: a scheduled collection has billions of earlier positions."""


@lru_cache(maxsize=64)
def _weyl_below(bounds: tuple[float, ...], end: int) -> list[int]:
    """Count, per bound, the positions before `end` with a Weyl value below it."""
    below = [0] * len(bounds)
    places = np.arange(BLOCK, dtype=np.float64)
    for begin in range(0, end, BLOCK):
        values = (places[: end - begin] + begin) * GOLDEN
        values -= np.floor(values)
        for number, bound in enumerate(bounds):
            below[number] += int(np.count_nonzero(values < bound))
    return below


def sample_tasks(
    rows: Sequence[TaskRow], seed: int, iteration: int, n: int, *, shuffle: bool = True, drop_last: bool = False
) -> list[TaskRow]:
    """Return the `n` task rows of an iteration (from 0; `n` is equal in all iterations).

    Args:
        shuffle: shuffle each epoch differently; otherwise keep the order of the rows.
        drop_last: end an epoch before a remainder of fewer than `n` rows.

    Raises:
        ConfigError: rows are missing, or fewer than `n` with `drop_last`.
    """
    if not rows:
        raise ConfigError("The environment has no training tasks. Check `environment` in the configuration.")
    begin = iteration * n
    if not isinstance(rows, WeightedTasks):
        if drop_last:
            refuse_incomplete_iteration(len(rows), n)
        length = len(rows) // n * n if drop_last else len(rows)
        positions = [divmod(position, length) for position in range(begin, begin + n)]
        return _in_epochs(rows, seed, positions, shuffle)
    names, before = rows.names(begin, begin + n), rows.counts(begin)
    drawn = {
        name: iter(
            _in_epochs(
                own,
                seed,
                [divmod(before[name] + place, len(own)) for place in range(names.count(name))],
                shuffle,
            )
        )
        for name, own in rows.tasks.items()
    }
    return [next(drawn[name]) for name in names]


def refuse_incomplete_iteration(tasks: int, n: int) -> None:
    """Refuse `rollout.drop_last` with so few training tasks that no iteration of `n` is complete."""
    if tasks < n:
        raise ConfigError(
            f"rollout.drop_last omits incomplete iterations, and {tasks} training tasks are fewer than {n} "
            f"(rollout.prompts_per_iteration). Lower this, or set rollout.drop_last to false."
        )


def _in_epochs(
    rows: Sequence[TaskRow], seed: int, positions: Sequence[tuple[int, int]], shuffle: bool
) -> list[TaskRow]:
    """Return the rows at these (epoch, place) pairs."""
    orders = {epoch: epoch_order(len(rows), seed, epoch) if shuffle else range(len(rows)) for epoch in dict(positions)}
    return [rows[orders[epoch][place]] for epoch, place in positions]


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """Return the places of `count` rows in the order of a shuffled epoch."""
    order = list(range(count))
    random.Random(derive_seed(seed, "task order", epoch)).shuffle(order)
    return order


def refuse_few_tasks(tasks: int, weighted: int, n: int) -> None:
    """Refuse a curriculum that has fewer than `n` tasks with a weight above 0, since it draws each once."""
    if weighted < n:
        raise ConfigError(
            f"rollout.curriculum draws each task once at most, and of {tasks} training tasks {weighted} have a weight above "
            f"0, fewer than the {n} that an iteration draws. Lower rollout.prompts_per_iteration, or set "
            "rollout.curriculum.kind to epochs."
        )


def draw_by_weight(
    rows: Sequence[TaskRow],
    curriculum: Curriculum,
    history: TaskHistory,
    seed: int,
    iteration: int,
    n: int,
    number: int = 1,
) -> list[TaskRow]:
    """Return the `n` task rows of round `number` by the weights of a curriculum.

    Rounds of one iteration continue each other and restart after all tasks are drawn. In a mixture, each environment
    has its share and a separate order.

    Raises:
        ConfigError: fewer than `n` tasks have a weight above 0, so that nothing is left to choose.
    """
    if not isinstance(rows, WeightedTasks):
        order = weighted_order(curriculum, rows, history, seed, iteration)
        refuse_few_tasks(len(rows), len(order), n)
        return [order[place % len(order)] for place in range((number - 1) * n, number * n)]
    names = rows.names(iteration * n, (iteration + 1) * n)
    drawn = {
        name: iter(
            draw_by_weight(own, curriculum, history, derive_seed(seed, name), iteration, names.count(name), number)
        )
        for name, own in rows.tasks.items()
        if name in names
    }
    return [next(drawn[name]) for name in names]


def iterations_of(tasks: int, config: RolloutConfig) -> int:
    """Return the number of iterations for `config.epochs` passes over the tasks."""
    assert config.epochs is not None, "asked only where passes are counted"
    n = config.prompts_per_iteration
    return config.epochs * (tasks // n) if config.drop_last else -(-config.epochs * tasks // n)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of an iteration's rounds."""

    tasks: list[TaskRow]
    """Tasks of all rounds."""
    rollouts: list[Rollout]
    """Rollouts of all rounds, in plan order."""
    rounds: int
    dynamic: bool
    """True: rounds were drawn until enough groups had spread. False: one round, and all its groups are trained on."""
    kept: list[str]
    """Groups to train on, at most `prompts_per_iteration`."""
    surplus: list[str]
    """Further groups with spread."""

    def metrics(self) -> dict[str, float]:
        """Return the number of rounds, the share of omitted groups and the mean reward of the rest."""
        if not self.dynamic:
            return {}
        kept_groups, surplus = set(self.kept), set(self.surplus)
        own = (rollout.counted_reward for rollout in self.rollouts if rollout.group_id in kept_groups)
        rewards = [reward for reward in own if reward is not None]
        groups = {rollout.group_id for rollout in self.rollouts}
        return {
            "dynamic_sampling/num_gen_batches": float(self.rounds),
            "dynamic_sampling/num_discarded_groups": float(len(groups - kept_groups - surplus)),
            "dynamic_sampling/num_discarded_valid_samples": float(sum(r.group_id in surplus for r in self.rollouts)),
            "dynamic_sampling/filtered_reward": sum(rewards) / len(rewards) if rewards else 0.0,
        }

    def details(self) -> dict[str, Any]:
        """Return the details for the manifest; validation reads them."""
        if not self.dynamic:
            return {}
        return {"dynamic_sampling": {"rounds": self.rounds, "kept": self.kept, "surplus": self.surplus}}


def sample_rounds(
    tasks: Sequence[TaskRow],
    config: RolloutConfig,
    seed: int,
    iteration: int,
    roll_out: Callable[[list[RolloutSpec]], list[Rollout]],
    history: TaskHistory = NOTHING,
    *,
    named_by_iteration: bool = False,
    first_draw: int = 1,
) -> Sampled:
    """Roll out `config.prompts_per_iteration` tasks.

    With dynamic sampling, draw as many per round until enough groups have spread or `max_rounds` are used.

    Args:
        roll_out: makes the rollouts of one round and returns them in the order of their specs.
        history: recorded rewards per task, for `config.curriculum`.
        named_by_iteration: see `plan_rollouts`.
        first_draw: see `round_tasks`.

    Raises:
        TooFewSequences: too few groups have spread after the last round, and `on_exhausted` is error.
    """
    policy = config.dynamic_sampling
    rows: list[TaskRow] = []
    rollouts: list[Rollout] = []
    number, spread = 0, list[str]()
    while len(spread) < config.prompts_per_iteration and number < (1 if policy is None else policy.max_rounds):
        number += 1
        rows += round_tasks(tasks, config, seed, iteration, number, history, first_draw=first_draw)
        planned = plan_rollouts(
            rows, config.group_size, seed, iteration, named_by_iteration=named_by_iteration, tasks=tasks
        )
        rollouts += roll_out(planned[-config.prompts_per_iteration * config.group_size :])
        spread = groups_with_spread(rollouts)
    if policy is None:
        return Sampled(rows, rollouts, number, dynamic=False, kept=[], surplus=[])
    if len(spread) < config.prompts_per_iteration and policy.on_exhausted == "error":
        raise TooFewSequences(
            f"iteration {iteration}: {len(spread)} of {config.prompts_per_iteration} groups have spread after {number} rounds "
            "(rollout.dynamic_sampling.max_rounds). The tasks are too easy or too hard for this policy: change them, raise "
            "max_rounds or rollout.group_size, or set rollout.dynamic_sampling.on_exhausted to continue."
        )
    return Sampled(
        rows,
        rollouts,
        number,
        dynamic=True,
        kept=spread[: config.prompts_per_iteration],
        surplus=spread[config.prompts_per_iteration :],
    )


def round_tasks(
    tasks: Sequence[TaskRow],
    config: RolloutConfig,
    seed: int,
    iteration: int,
    number: int,
    history: TaskHistory = NOTHING,
    *,
    first_draw: int = 1,
) -> list[TaskRow]:
    """Return the tasks of round `number` (1, 2, …).

    With a curriculum, draw by its weights. Otherwise the first round takes the iteration's part of the epoch, and later
    rounds use new shuffles.

    Args:
        first_draw: the iteration that draws the first tasks of the first epoch (`Run.first_draw`).
    """
    if (curriculum := build_curriculum(config.curriculum)) is not None:
        return draw_by_weight(tasks, curriculum, history, seed, iteration, config.prompts_per_iteration, number)
    return sample_tasks(
        tasks,
        seed if number == 1 else derive_seed(seed, "dynamic sampling round", number),
        iteration - first_draw,
        config.prompts_per_iteration,
        shuffle=config.shuffle,
        drop_last=config.drop_last,
    )
