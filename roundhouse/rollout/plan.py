"""What an iteration will roll out, decided before anything runs: which tasks, and which rollouts of each.

Invariants: the plan is a pure function of rows, group size, run seed and iteration, so that a resumed run and another machine
choose the same; rollout ids in it are unique; the seed of a rollout depends on nothing but run seed, iteration, group and
sample, so that a retry draws the same. The tasks of iterations 0, 1, 2, … in a row are epochs, each a shuffle of all tasks, or
in their own order; no task comes twice in an epoch. An iteration that spans two epochs may therefore hold a task twice; with
`drop_last` none does, and an epoch ends before a remainder that fills no iteration. With `rollout.curriculum` there are no
epochs: each iteration draws by what is recorded of the tasks (`roundhouse.rollout.curriculum`).

    rows a b, group size 2        ->  a/0 a/1 b/0 b/1
    rows a b c, 2 an iteration    ->  c a | b · a | b c      (· begins epoch 1)

Under dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) rounds of tasks follow each other until enough groups have spread.
Which tasks a round draws depends on (run seed, iteration, round) alone, and whether there is a next round on the rewards of the
rounds before. All rounds are parts of one collect stage: what an interrupted attempt had finished is found in the store, so the
next attempt goes through the same rounds and generates only the rest. Every rollout of every round stays on record; validation
omits those that are not `kept`.

    3 tasks wanted      round 1: a - b      round 2: - c d      kept: a b c, surplus: d      (- has no spread)
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from roundhouse.config.models import RolloutConfig
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError, DataError, RoundhouseError, TooFewSequences
from roundhouse.rollout.curriculum import Curriculum, TaskHistory, build_curriculum, weighted_order
from roundhouse.trajectories.records import Rollout, derive_seed, groups_with_spread

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
    """None: from its task."""

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.sample}"


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Where a branch leaves the rollout that it continues."""

    rollout: Rollout
    """Whole, with its items and turns."""
    turn: int
    """The first that is made anew."""


def branch_spec(rollout: Rollout, turn: int, sample: int) -> RolloutSpec:
    """Branch `sample` of a rollout's turn. The branches of one turn are a group: `calc/7/0@2` of turn 2 of `calc/7/0`."""
    seed = derive_seed(rollout.seed, "branch", turn, sample)
    return RolloutSpec(f"{rollout.rollout_id}@{turn}", sample, rollout.task, seed, BranchPoint(rollout, turn))


class ReorderError(RoundhouseError):
    """Results do not match the plan one to one."""


def plan_rollouts(
    rows: Sequence[TaskRow], group_size: int, seed: int, iteration: int, *, named_by_iteration: bool = False
) -> list[RolloutSpec]:
    """`group_size` rollouts of each row. A task that comes again in the same plan makes a group of its own, `<task_id>#2`.

    Args:
        named_by_iteration: groups are called `<task_id>@<iteration>`, for datasets with groups of several iterations. Their
            seeds are the same.

    Raises:
        DataError: a row has no task_id.
    """
    specs = []
    times: dict[str, int] = {}
    for index, row in enumerate(rows):
        if not row.get("task_id"):
            raise DataError(f"Task row {index} has no task_id: rollouts of different tasks could not be told apart.")
        task_id = str(row["task_id"])
        times[task_id] = times.get(task_id, 0) + 1
        group_id = task_id if times[task_id] == 1 else f"{task_id}#{times[task_id]}"
        name = f"{group_id}@{iteration}" if named_by_iteration else group_id
        for sample in range(group_size):
            specs.append(RolloutSpec(name, sample, row, derive_seed(seed, iteration, group_id, sample)))
    return specs


def reorder(results: Iterable[tuple[int, T]], count: int) -> list[T]:
    """Results by their index in the plan, as a list in the plan's order.

    Raises:
        ReorderError: an index is missing, comes twice, lies outside 0..count-1 or is no whole number; the text names all of
            them.
    """
    found: dict[int, T] = {}
    duplicate, outside = set(), set()
    no_index: list[Any] = []
    for index, result in results:
        if type(index) is not int:
            no_index.append(index)
        elif not 0 <= index < count:
            outside.add(index)
        elif index in found:
            duplicate.add(index)
        else:
            found[index] = result
    missing = [index for index in range(count) if index not in found]
    if missing or duplicate or outside or no_index:
        named = f", no whole number {no_index}" if no_index else ""
        raise ReorderError(
            f"Results do not match the plan of {count} rollouts: missing {missing}, duplicate {sorted(duplicate)}, "
            f"out of range {sorted(outside)}{named}."
        )
    return [found[index] for index in range(count)]


class WeightedTasks(Sequence[TaskRow]):
    """The tasks of a mixture's environments, which are drawn by weight.

    Invariant: which environment the task at a position is of depends on the weights and the position alone (Weyl's sequence of
    the golden ratio), so that any stretch of positions, and every iteration, has nearly the shares that the weights say; of
    each environment the tasks come in epochs of its own.
    """

    def __init__(self, tasks: Mapping[str, Sequence[TaskRow]], weights: Mapping[str, float]) -> None:
        self.tasks, self.weights = tasks, weights
        total, reached = sum(weights.values()), 0.0
        self._bounds: list[float] = []
        for name in tasks:
            reached += weights[name] / total
            self._bounds.append(reached)

    def names(self, count: int) -> list[str]:
        """The environments of the first `count` positions."""
        known, last = list(self.tasks), len(self.tasks) - 1
        return [known[min(bisect_right(self._bounds, place * GOLDEN % 1.0), last)] for place in range(count)]

    def __len__(self) -> int:
        return sum(map(len, self.tasks.values()))

    def __getitem__(self, index: Any) -> Any:
        return [row for rows in self.tasks.values() for row in rows][index]


GOLDEN = (5**0.5 - 1) / 2


def sample_tasks(
    rows: Sequence[TaskRow], seed: int, iteration: int, n: int, *, shuffle: bool = True, drop_last: bool = False
) -> list[TaskRow]:
    """The `n` task rows of an iteration (counted from 0; `n` is the same in all of them).

    Args:
        shuffle: each epoch in an order of its own; otherwise in the order of the rows.
        drop_last: an epoch ends before a remainder of fewer than `n` rows.

    Raises:
        ConfigError: there are no rows, or fewer than `n` with `drop_last`.
    """
    if not rows:
        raise ConfigError(
            "The environment has no training tasks to sample from: check `environment` in the configuration."
        )
    begin = iteration * n
    if not isinstance(rows, WeightedTasks):
        length = len(rows) // n * n if drop_last else len(rows)
        if not length:
            raise ConfigError(
                f"rollout.drop_last leaves out what fills no iteration, and the {len(rows)} training tasks do not fill one of "
                f"{n} (rollout.prompts_per_iteration). Lower that, or set rollout.drop_last to false."
            )
        positions = [divmod(position, length) for position in range(begin, begin + n)]
        return _in_epochs(rows, seed, positions, shuffle)
    names = rows.names(begin + n)
    drawn = {
        name: iter(
            _in_epochs(
                own,
                seed,
                [divmod(place, len(own)) for place in range(names[:begin].count(name), names.count(name))],
                shuffle,
            )
        )
        for name, own in rows.tasks.items()
    }
    return [next(drawn[name]) for name in names[begin:]]


def _in_epochs(
    rows: Sequence[TaskRow], seed: int, positions: Sequence[tuple[int, int]], shuffle: bool
) -> list[TaskRow]:
    """The rows at these (epoch, place)s."""
    orders = {epoch: epoch_order(len(rows), seed, epoch) if shuffle else range(len(rows)) for epoch in dict(positions)}
    return [rows[orders[epoch][place]] for epoch, place in positions]


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The places of `count` rows in the order of a shuffled epoch."""
    order = list(range(count))
    random.Random(derive_seed(seed, "task order", epoch)).shuffle(order)
    return order


def draw_by_weight(
    rows: Sequence[TaskRow],
    curriculum: Curriculum,
    history: TaskHistory,
    seed: int,
    iteration: int,
    n: int,
    number: int = 1,
) -> list[TaskRow]:
    """The `n` task rows of round `number` of an iteration, by the weights of a curriculum. Rounds of one iteration continue
    each other, and begin again when all tasks were drawn. Of a mixture each environment has its share and its own order.

    Raises:
        ConfigError: fewer than `n` tasks have a weight above 0, so that there is nothing to choose.
    """
    if not isinstance(rows, WeightedTasks):
        order = weighted_order(curriculum, rows, history, seed, iteration)
        if len(order) < n:
            raise ConfigError(
                f"rollout.curriculum draws each task once at most, and of {len(rows)} training tasks {len(order)} have a "
                f"weight above 0, fewer than the {n} that an iteration draws. Lower rollout.prompts_per_iteration, or set "
                "rollout.curriculum.kind to epochs."
            )
        return [order[place % len(order)] for place in range((number - 1) * n, number * n)]
    names = rows.names((iteration + 1) * n)[iteration * n :]
    drawn = {
        name: iter(
            draw_by_weight(own, curriculum, history, derive_seed(seed, name), iteration, names.count(name), number)
        )
        for name, own in rows.tasks.items()
        if name in names
    }
    return [next(drawn[name]) for name in names]


def iterations_of(tasks: int, config: RolloutConfig) -> int:
    """How many iterations `config.epochs` passes over so many tasks take."""
    assert config.epochs is not None, "asked only where passes are counted"
    n = config.prompts_per_iteration
    return config.epochs * (tasks // n) if config.drop_last else -(-config.epochs * tasks // n)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rounds came to."""

    tasks: list[TaskRow]
    """Drawn in all rounds."""
    rollouts: list[Rollout]
    """Of all rounds, in the order of their plans."""
    rounds: int
    dynamic: bool
    """There were to be as many rounds as it takes. Otherwise there was one, and all its groups are trained on."""
    kept: list[str]
    """Groups to train on, at most as many as tasks were wanted."""
    surplus: list[str]
    """Groups with spread beyond these."""

    def metrics(self) -> dict[str, float]:
        """Rounds, what was put aside, and the mean reward of what is left."""
        if not self.dynamic:
            return {}
        kept, surplus = set(self.kept), set(self.surplus)
        rewards = [
            rollout.reward for rollout in self.rollouts if rollout.group_id in kept and rollout.reward is not None
        ]
        groups = {rollout.group_id for rollout in self.rollouts}
        return {
            "dynamic_sampling/num_gen_batches": float(self.rounds),
            "dynamic_sampling/num_discarded_groups": float(len(groups - kept - surplus)),
            "dynamic_sampling/num_discarded_valid_samples": float(sum(r.group_id in surplus for r in self.rollouts)),
            "dynamic_sampling/filtered_reward": sum(rewards) / len(rewards) if rewards else 0.0,
        }

    def details(self) -> dict[str, Any]:
        """For the manifest; validation reads it."""
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
) -> Sampled:
    """Roll out `config.prompts_per_iteration` tasks; under dynamic sampling as many a round, until that many groups have spread
    or `max_rounds` are over.

    Args:
        roll_out: makes the rollouts of one round, and returns them in the order of their specs.
        history: what is recorded of the tasks, for `config.curriculum`.
        named_by_iteration: as of `plan_rollouts`.

    Raises:
        TooFewSequences: too few groups have spread after the last round, and `on_exhausted` is error.
    """
    policy = config.dynamic_sampling
    rows: list[TaskRow] = []
    rollouts: list[Rollout] = []
    number, found = 0, list[str]()
    while len(found) < config.prompts_per_iteration and number < (1 if policy is None else policy.max_rounds):
        number += 1
        rows += round_tasks(tasks, config, seed, iteration, number, history)
        planned = plan_rollouts(rows, config.group_size, seed, iteration, named_by_iteration=named_by_iteration)
        rollouts += roll_out(planned[-config.prompts_per_iteration * config.group_size :])
        found = groups_with_spread(rollouts)
    if policy is None:
        return Sampled(rows, rollouts, number, dynamic=False, kept=[], surplus=[])
    if len(found) < config.prompts_per_iteration and policy.on_exhausted == "error":
        raise TooFewSequences(
            f"iteration {iteration}: {len(found)} of {config.prompts_per_iteration} groups have spread after {number} rounds "
            "(rollout.dynamic_sampling.max_rounds). The tasks are too easy or too hard for this policy: change them, raise "
            "max_rounds or rollout.group_size, or set rollout.dynamic_sampling.on_exhausted to continue."
        )
    return Sampled(
        rows,
        rollouts,
        number,
        dynamic=True,
        kept=found[: config.prompts_per_iteration],
        surplus=found[config.prompts_per_iteration :],
    )


def round_tasks(
    tasks: Sequence[TaskRow],
    config: RolloutConfig,
    seed: int,
    iteration: int,
    number: int,
    history: TaskHistory = NOTHING,
) -> list[TaskRow]:
    """The tasks of round `number` (1, 2, …): by the weights of `config.curriculum`; or else the iteration's own of the epoch in
    the first round, and each later one in an order of its own."""
    if (curriculum := build_curriculum(config.curriculum)) is not None:
        return draw_by_weight(tasks, curriculum, history, seed, iteration, config.prompts_per_iteration, number)
    return sample_tasks(
        tasks,
        seed if number == 1 else derive_seed(seed, "dynamic sampling round", number),
        iteration - 1 if config.counts_epochs else iteration,
        config.prompts_per_iteration,
        shuffle=config.shuffle,
        drop_last=config.drop_last,
    )
