"""What a controller is held to: the numbers of the plan and of the bound.

The bound by construction. Let P be the groups of an iteration, W the window and S the lag at the start. The rollouts of the
group at position p may begin on version v when floor(p / P) - v <= S. Step k trains on P complete groups among the candidates:
the untrained groups at positions below h + W, with h the oldest untrained one, or the P oldest where that is fewer. While the
group at p is passed over, everything that has been trained lies below p + W and is not p itself, so k P <= p + W - 1; it is
trained in step floor((p + W - 1) / P) + 1 at the latest, on version floor((p + W - 1) / P), and its age is at most

    floor((p + W - 1) / P) - floor(p / P) + S  <=  S + ceil((W - 1) / P)  =  staleness.

With W = 1 the candidates are the iteration's own P groups, and S is the whole bound; `k - 1` is then "train version + 1", and
the rule of the start is the known one: block when train version + 1 - rollout version > threshold.

    P = 4, W = 5, staleness 2: S = 2 - ceil(4 / 4) = 1. Groups begin at most a version early and are passed over at most once.

With W > 1, S has to be at least 1: what could overtake belongs to the next iteration and begins a version early.

With `rollout.dynamic_sampling` an iteration has P positions for each round that it may draw, drawn or not, and its step trains
on what all of its rounds brought. W is 1 then, and the same rule of the start holds for every round: a position's iteration is
floor(p / (P * rounds)), and the age of a rollout of any round is at most S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from roundhouse.config.rollout import Asynchrony
from roundhouse.errors import ConfigError
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.trajectories.records import Rollout

Key = tuple[int, int]
"""(position, sample)."""


@dataclass(frozen=True)
class StalenessBound:
    """The plan's numbers and the rules of `Asynchrony`."""

    asynchrony: Asynchrony
    groups: int
    """Of an iteration."""
    group_size: int
    """Rollouts of a group."""
    iterations: int
    validate_every: int = 0
    """Versions between evaluations, version 0 first; 0 for none."""
    first_version: int = 0
    """That the plan begins with: a fork's is its parent's. Everything before it counts as trained and evaluated."""
    evaluates_first: bool = True
    """Whether `first_version` is evaluated by the plan, not before it begins."""
    rounds: int = 1
    """Rounds of `groups` groups that an iteration may draw (`rollout.dynamic_sampling.max_rounds`)."""

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "iterations", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; an asynchronous run needs 1 or more.")
        if (unfit := self.asynchrony.unfit_window(self.groups)) is not None:
            raise ConfigError(unfit)
        if self.rounds > 1 and self.chooses:
            raise ConfigError(
                f"rounds is {self.rounds}; with asynchrony.window {self.asynchrony.window} it has to be 1."
            )

    @cached_property
    def start_lag(self) -> int:
        """S above."""
        return self.asynchrony.start_lag(self.groups)

    @cached_property
    def chooses(self) -> bool:
        """Whether a step may train on other groups than its iteration's own."""
        return self.asynchrony.window > 1

    @cached_property
    def positions(self) -> int:
        """Of an iteration: the groups of all rounds that it may draw."""
        return self.groups * self.rounds

    @cached_property
    def total(self) -> int:
        """Positions of the whole plan."""
        return self.positions * self.iterations

    @cached_property
    def barrier(self) -> bool:
        """Whether all replicas have to hold the trained version before a rollout begins."""
        return self.asynchrony.staleness == 0

    @cached_property
    def starts_during_transfer(self) -> bool:
        """Whether a rollout may begin, queued in the engine, while its replica's weights are exchanged."""
        return self.asynchrony.mode == "fully-async" and not self.barrier

    @cached_property
    def drains(self) -> bool:
        """Whether a replica's rollouts end before its weights are exchanged."""
        return self.asynchrony.refit == "drain" or self.barrier

    def iteration_of(self, position: int) -> int:
        """The iteration that a group belongs to, from 1."""
        return position // self.positions + 1

    def round_of(self, position: int) -> int:
        """The round of its iteration that a group belongs to, from 1."""
        return position % self.positions // self.groups + 1

    def round_positions(self, iteration: int, number: int) -> range:
        """The groups of a round of an iteration."""
        first = (iteration - 1) * self.positions + (number - 1) * self.groups
        return range(first, first + self.groups)

    def may_begin(self, position: int, version: int) -> bool:
        """Whether a rollout of this group may begin on this version."""
        return self.iteration_of(position) - 1 - version <= self.start_lag

    def due(self, evaluated: int, version: int) -> int | None:
        """The version that is to be evaluated next, if it exists already."""
        if self.validate_every == 0:
            return None
        following = (evaluated // self.validate_every + 1) * self.validate_every
        return following if following <= version else None


class PlannedRollouts:
    """A plan's rollouts, as the controller counts them: positions of groups and numbers of samples."""

    def __init__(self, bound: StalenessBound, specs: Callable[..., Sequence[RolloutSpec]]) -> None:
        self.bound = bound
        self.specs = specs
        """The rollouts of a round of an iteration, the first unless it is named; groups in order, samples in order."""

    def iteration_of(self, position: int) -> int:
        return self.bound.iteration_of(position)

    def groups(self, iteration: int, number: int = 1) -> tuple[int, ...]:
        """The positions of the groups of an iteration's round."""
        return tuple(self.bound.round_positions(iteration, number))

    def samples(self, position: int) -> Iterator[Key]:
        """The rollouts of a group."""
        return ((position, sample) for sample in range(self.bound.group_size))

    def spec(self, key: Key) -> RolloutSpec:
        """The spec of a rollout of the controller's."""
        groups, size = self.bound.groups, self.bound.group_size
        specs = self.specs(self.iteration_of(key[0]), self.bound.round_of(key[0]))
        return specs[key[0] % groups * size + key[1]]

    def keys(self, iteration: int, number: int = 1) -> Iterator[Key]:
        """The rollouts of a round as the controller calls them, in the order of `specs`."""
        for position in self.groups(iteration, number):
            yield from self.samples(position)

    def keyed(self, iteration: int, rollouts: Iterable[Rollout]) -> dict[Key, Rollout]:
        """Rollouts of an iteration by their key; what is not of the plan is left out."""
        left, found = {rollout.rollout_id: rollout for rollout in rollouts}, dict[Key, Rollout]()
        for number in range(1, self.bound.rounds + 1):
            if not left:
                break
            for key, spec in zip(self.keys(iteration, number), self.specs(iteration, number), strict=True):
                if (rollout := left.pop(spec.rollout_id, None)) is not None:
                    found[key] = rollout
        return found
