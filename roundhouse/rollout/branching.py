"""Branches as a sampling strategy: after the rollouts of an iteration, some of them go on anew from one of their turns
(`rollout.branching`).

Invariants: which turns are branched is a pure function of the section, of (run seed, iteration) and of what the store holds of
the rollouts, so that an interrupted stage that resumes chooses the same ones; of a group, which rollouts are taken depends on
the others only by who comes first. Each branch is a rollout of the same stage, by the same policy version. Only its new turns
are trained on, so that the turns before have their one gradient in the rollout that it leaves, and only they are generated.

    group a (rewards 1 0 0)     a/0 ── a/1 ── a/2        rollouts 1, samples 4: a/1 is drawn, and its turn 2
    group a/1@2                 a/1@2/0 … a/1@2/3        four new ends, compared with each other and with that of a/1
    group b (rewards 0 0 0)     none: it teaches nothing either way

From a state, the rewards of several ends say what the choice there is worth (VinePPO, arXiv 2410.01679, does so from every
step; it is a baseline that no critic has to learn). Where to branch is drawn, or is where the policy was least certain right
after the environment had answered: there the entropy of the first tokens rises and alternatives are worth more (ARPO, arXiv
2507.19849, section 3; TreeRL, arXiv 2506.11902, branches at its most uncertain tokens). Both branch by entropy; here it is the
mean of -log p of the tokens that were sampled, its estimate from one sample, since the store has no distributions.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.config.rollout import Branching
from roundhouse.rollout.plan import BranchPoint, RolloutSpec, Sampled, branch_spec
from roundhouse.trajectories.records import Rollout, Status, Turn, derive_seed, groups_with_spread, has_spread

FIRST_TOKENS = 16
"""Of a turn, that say how certain the policy was when it began: a long reply has many more that follow from its beginning."""


def branch_points(
    rollouts: Sequence[Rollout], groups: Collection[str], config: Branching, seed: int, iteration: int
) -> list[BranchPoint]:
    """The turns to branch: of each of the `groups` up to `config.rollouts`, of rollouts with a reward and two turns or more.

    A first turn is never branched: its branches would be rollouts of the task, as `rollout.group_size` has them.
    """
    candidates: dict[str, list[Rollout]] = {group: [] for group in groups}
    for rollout in rollouts:
        ended = rollout.status in (Status.COMPLETED, Status.TRUNCATED)
        if ended and len(rollout.turns) > 1 and rollout.group_id in candidates:
            candidates[rollout.group_id].append(rollout)

    def order(rollout: Rollout) -> int:
        return derive_seed(seed, iteration, "branched rollout", rollout.rollout_id)

    return [
        BranchPoint(rollout, _turn(rollout, config, derive_seed(seed, iteration, "branched turn", rollout.rollout_id)))
        for members in candidates.values()
        for rollout in sorted(members, key=order)[: config.rollouts]
    ]


def _turn(rollout: Rollout, config: Branching, seed: int) -> int:
    later = rollout.turns[1:]
    if config.turn == "random":
        return later[seed % len(later)].turn
    return min(later, key=certainty).turn


def certainty(turn: Turn) -> float:
    """Mean log-probability of the turn's first tokens, as stored: rounded to float32. 0 without any."""
    first = array("f", turn.generation_log_probs[:FIRST_TOKENS])
    return math.fsum(first) / len(first) if first else 0.0


def branched_groups(sampled: Sampled) -> list[str]:
    """The groups with spread that the rounds of an iteration came to; of dynamic sampling, those that it keeps."""
    return sampled.kept if sampled.dynamic else groups_with_spread(sampled.rollouts)


def plan_branches(
    rollouts: Sequence[Rollout], groups: Collection[str], config: Branching, seed: int, iteration: int
) -> list[RolloutSpec]:
    """`config.samples` branches of each of the `branch_points`; `rollouts` are whole."""
    points = branch_points(rollouts, groups, config, seed, iteration)
    return [branch_spec(point.rollout, point.turn, sample) for point in points for sample in range(config.samples)]


@dataclass(frozen=True, slots=True)
class Branched:
    """What the branches of an iteration came to."""

    specs: Sequence[RolloutSpec]
    rollouts: Sequence[Rollout]
    """In the order of the specs."""

    @property
    def points(self) -> dict[str, BranchPoint]:
        """By the id of the rollout that was branched."""
        return {spec.branch.rollout.rollout_id: spec.branch for spec in self.specs if spec.branch is not None}

    def metrics(self) -> dict[str, float]:
        """Of the branches alone; empty where there is none."""
        if not self.specs:
            return {}
        points = self.points
        before = {name: point.rollout.reward for name, point in points.items() if point.rollout.reward is not None}
        ends: dict[str, list[float]] = {name: [] for name in points}
        for each in self.rollouts:
            if each.reward is not None and each.branched_from is not None:
                ends[each.branched_from].append(each.reward)
        means = {"branching/reward": [reward for own in ends.values() for reward in own]}
        means["branching/reward_before"] = list(before.values())
        return {
            "branching/groups": float(len(points)),
            "branching/groups_with_spread": float(
                sum(has_spread([*ends[name], left]) for name, left in before.items())
            ),
            "branching/rollouts": float(len(self.rollouts)),
            "branching/failed": float(sum(each.status is Status.FAILED for each in self.rollouts)),
            "branching/not_rebuilt": float(sum(each.failure_code == "not_rebuilt" for each in self.rollouts)),
            "branching/generated_tokens": float(sum(each.generated_tokens for each in self.rollouts)),
            "branching/turn_mean": math.fsum(point.turn for point in points.values()) / len(points),
            **{name: math.fsum(values) / len(values) for name, values in means.items() if values},
        }

    def details(self) -> dict[str, Any]:
        """For the manifest: the turn at which each of these rollouts was branched."""
        return {"branching": {name: point.turn for name, point in self.points.items()}} if self.specs else {}
