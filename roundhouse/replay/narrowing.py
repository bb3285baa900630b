"""The smallest set of what is to blame, within so many trials, and collections with some of their groups substituted.

Invariant: a set that is returned was seen to do it by a trial of its own. For every n and k the number of trials has a bound
that is known beforehand, and where it is used up the smallest set seen so far is returned, said not to be proved smallest.

    16 groups, of which 3 and 12 together do it      14 trials at most; one for each subset would be 65,536
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from roundhouse.trajectories.records import Rollout

T = TypeVar("T")
Group = tuple[int, str]
"""Iteration and group id."""

NARROWING_BUDGET = 64
"""Stage runs: a few groups of hundreds, of one iteration."""


class _TrialsUsedUp(Exception):
    """A search for the smallest set ends before its end."""


def smallest_set(items: Sequence[T], does_it: Callable[[list[T]], bool], trials: int) -> tuple[list[T], bool]:
    """A set that does it and of which no part does, where all items together do (QuickXplain, Junker 2004).

    Of n items, a set of k takes at most 2 k (1 + log2(n / k)) trials.

    Args:
        does_it: whether these items, in their order, do it; what does it is taken to do so with more items, too.
        trials: calls of `does_it` at most.

    Returns:
        The set, and whether it is the smallest. Where the trials were used up, or a larger set does it that has one in it
        that does not, it is the smallest set that was seen to do it.
    """
    results: dict[frozenset[int], bool] = {frozenset(range(len(items))): True}

    def does(places: Sequence[int]) -> bool:
        key = frozenset(places)
        if key not in results:
            if len(results) > trials:
                raise _TrialsUsedUp
            results[key] = does_it([items[place] for place in sorted(key)])
        return results[key]

    def needed(base: list[int], grew: bool, places: list[int]) -> list[int]:
        """Of these places, the fewest that do it with `base`."""
        if grew and does(base):
            return []
        if len(places) == 1:
            return places
        left, right = places[: len(places) // 2], places[len(places) // 2 :]
        of_right = needed(base + left, True, right)
        return needed(base + of_right, bool(of_right), left) + of_right

    proved = False
    with contextlib.suppress(_TrialsUsedUp):
        proved = does(needed([], False, list(range(len(items)))))
    fewest = min((key for key, done in results.items() if done), key=lambda key: (len(key), sorted(key)))
    return [items[place] for place in sorted(fewest)], proved


class SubstitutedGroups:
    """The groups of some iterations, and healthy ones to take their places, so that all steps keep their size.

    A group has the healthy one of its id in its place, else one whose id no recorded group has; where there are no more of
    them, its place stays empty.
    """

    def __init__(self, recorded: Mapping[int, list[Rollout]], healthy: list[Rollout]) -> None:
        self._recorded = {k: _by_group(rollouts) for k, rollouts in recorded.items()}
        self._instead: dict[Group, list[Rollout]] = {}
        self.every = [(k, group) for k, own in self._recorded.items() for group in own]
        spare = _by_group(healthy)
        for k, own in self._recorded.items():
            others = iter([rollouts for group, rollouts in spare.items() if group not in own])
            self._instead |= {(k, group): spare[group] if group in spare else next(others, []) for group in own}

    def without(self, some: Sequence[Group]) -> dict[int, list[Rollout]]:
        """By iteration, the rollouts with healthy ones in the places of these groups."""
        left_out = set(some)
        return {
            k: [
                rollout
                for group, rollouts in own.items()
                for rollout in (self._instead[k, group] if (k, group) in left_out else rollouts)
            ]
            for k, own in self._recorded.items()
        }


def groups_in_words(groups: Sequence[Group]) -> str:
    """As a table names them."""
    return f"{len(groups)} groups" if len(groups) > 1 else f"group {groups[0][1]}"


def _by_group(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    found: dict[str, list[Rollout]] = {}
    for each in rollouts:
        found.setdefault(each.group_id, []).append(each)
    return found
