"""Proofs about the rollouts of a batch together: what one row alone cannot show.

Invariant: of rollouts that are the same work twice, the first in the given order is kept and the others are refused; whatever
else agrees by chance (a certain policy says the same words with the same log-probabilities) is legal. So:

* a copy is told by its clock: equal turns, and equal start and duration, which two measurements never share;
* one seed twice in a group is one draw twice, whatever the texts;
* members of a group are samples of one task: those whose task row or environment is not that of the most are refused, and
  all of them when there is no most.

Seed 0 stands for "not recorded": the rollout was imported, where rows of one task may carry fields of each rollout. The last
two rules pass over it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from roundhouse.trajectories.proofs import Refusal
from roundhouse.trajectories.records import Rollout


def disagreements(rollouts: Sequence[Rollout]) -> dict[str, Refusal]:
    """Refusals by rollout id; give only rollouts with a reward."""
    return {**_strangers(rollouts), **_same_seeds(rollouts), **_copies(rollouts)}


def _copies(rollouts: Iterable[Rollout]) -> dict[str, Refusal]:
    found: dict[str, Refusal] = {}
    originals: dict[tuple[float, float, float], list[Rollout]] = {}
    for rollout in rollouts:
        if not rollout.started_at or not rollout.seconds:
            continue
        timed = originals.setdefault((rollout.started_at, rollout.seconds, rollout.generation_seconds), [])
        for original in timed:
            if original.rollout_id != rollout.rollout_id and original.turns == rollout.turns:
                evidence = (
                    f"the same turns, begun at {rollout.started_at} for {rollout.seconds} s, as {original.rollout_id}"
                )
                found[rollout.rollout_id] = Refusal("copied_rollout", evidence)
                break
        else:
            timed.append(rollout)
    return found


def _same_seeds(rollouts: Iterable[Rollout]) -> dict[str, Refusal]:
    found: dict[str, Refusal] = {}
    holders: dict[tuple[str, int], str] = {}
    for rollout in rollouts:
        if rollout.seed == 0:
            continue
        holder = holders.setdefault((rollout.group_id, rollout.seed), rollout.rollout_id)
        if holder != rollout.rollout_id:
            found[rollout.rollout_id] = Refusal("repeated_seed", f"seed {rollout.seed} is that of {holder}")
    return found


def _strangers(rollouts: Iterable[Rollout]) -> dict[str, Refusal]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.seed == 0:
            continue
        groups.setdefault(rollout.group_id, []).append(rollout)
    return {name: refusal for members in groups.values() for name, refusal in _strangers_of(members)}


def _strangers_of(members: list[Rollout]) -> Iterable[tuple[str, Refusal]]:
    first = members[0]
    if all(each.task == first.task and each.environment == first.environment for each in members):
        return
    kinds: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in members:
        # As text, in which also NaN equals itself.
        kinds.setdefault((json.dumps(rollout.task, sort_keys=True), rollout.environment), []).append(rollout)
    if len(kinds) == 1:
        return
    most = max(map(len, kinds.values()))
    clear = sum(len(alike) == most for alike in kinds.values()) == 1
    for alike in kinds.values():
        if clear and len(alike) == most:
            continue
        for rollout in alike:
            evidence = f"{len(alike)} of {len(members)} rollouts of the group have this task row and environment"
            yield rollout.rollout_id, Refusal("task_row", evidence)
