"""The shards of a collection: pure, from its plan.

Invariant: each planned rollout is in exactly one shard, each group is in one, and which one depends on the plan and the number
of shards alone. So what a shard wrote can be told by the name of the file, and a worker looks at no other shard's.

    groups a b c d e, 2 shards  ->  s0001of0002: a b c     s0002of0002: d e
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from roundhouse.rollout.plan import RolloutSpec

_LABEL = re.compile(r"-(?P<label>s\d{4,}of(?P<count>\d{4,}))-")


@dataclass(frozen=True)
class Shard:
    """Some groups of a plan."""

    number: int
    """1, 2, …"""
    count: int
    """Of the shards that were asked for; some may have no groups, and do not exist."""
    specs: Sequence[RolloutSpec]

    @property
    def label(self) -> str:
        return f"s{self.number:04d}of{self.count:04d}"

    @cached_property
    def rollout_ids(self) -> frozenset[str]:
        return frozenset(spec.rollout_id for spec in self.specs)

    def may_be_in(self, name: str) -> bool:
        """Whether a part of this name can hold one of its rollouts: its own can, and those of attempts that split the plan in
        another way, or not at all."""
        found = _LABEL.search(name)
        return found is None or int(found["count"]) != self.count or found["label"] == self.label

    def digest(self) -> str:
        """Of its rollouts and their seeds."""
        plan = "\n".join(f"{spec.rollout_id} {spec.seed}" for spec in self.specs)
        return hashlib.sha256(plan.encode()).hexdigest()


def split(specs: Sequence[RolloutSpec], count: int) -> list[Shard]:
    """At most `count` shards with at least one group each, in the plan's order; they differ by one group at most."""
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group_id)]
    n = min(count, len(groups))
    borders = [index * len(groups) // n for index in range(n + 1)] if n else []
    found = []
    for number, (first, last) in enumerate(pairwise(borders), 1):
        found.append(Shard(number, count, [spec for group in groups[first:last] for spec in group]))
    return found


def shares(whole: int, count: int) -> list[int]:
    """A whole number in `count` parts that differ by one at most; none is 0.

    >>> shares(7, 3)
    [3, 2, 2]
    """
    return [max(1, whole // count + (index < whole % count)) for index in range(count)]
