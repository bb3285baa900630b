"""The smallest responsible set, within a number of trials, and collections with some of their groups substituted.

Invariant: a separate trial has shown that a returned set is sufficient. For every n and k the number of trials has a
known bound; if it is used up, the smallest sufficient set so far is returned and marked as not proved smallest.

    16 groups, of which 3 and 12 together suffice      14 trials at most; one for each subset would be 65,536
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
    """Return a sufficient set without a sufficient part, if all items together suffice (QuickXplain, Junker 2004).

    Of n items, a set of k takes at most 2 k (1 + log2(n / k)) trials.

    Args:
        does_it: whether these items, in their order, suffice; a superset is assumed to suffice, too.
        trials: calls of `does_it` at most.

    Returns:
        The set, and whether it is the smallest. If the trials were used up, or a superset does not suffice, it is the
        smallest
        set that was seen to suffice.
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
        """Return the fewest of these places that suffice with `base`."""
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
    fewest = min((key for key, suffices in results.items() if suffices), key=lambda key: (len(key), sorted(key)))
    return [items[place] for place in sorted(fewest)], proved


class SubstitutedGroups:
    """The groups of some iterations, and healthy replacements, so that all steps keep their size.

    A group is replaced by the healthy one with its ID, else by one with an ID that no recorded group has; without a
    replacement its place stays empty.
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
    """Return the groups as a table names them."""
    return f"{len(groups)} groups" if len(groups) > 1 else f"group {groups[0][1]}"


def _by_group(rollouts: list[Rollout]) -> dict[str, list[Rollout]]:
    by_group: dict[str, list[Rollout]] = {}
    for each in rollouts:
        by_group.setdefault(each.group_id, []).append(each)
    return by_group
