"""Rounds of tasks: one, or as dynamic sampling has it, one after another until enough groups have spread (DAPO, arXiv
2503.14476, section 3.2).

Invariant: which tasks a round draws depends on (run seed, iteration, round) alone, and whether there is a next round on the
rewards of the rounds before. All rounds are parts of one collect stage: what an interrupted attempt had finished is found in
the store, so the next attempt goes through the same rounds and generates only the rest. Every rollout of every round stays
on record; validation omits those that are not `kept`.

    3 tasks wanted      round 1: a - b      round 2: - c d      kept: a b c, surplus: d      (- has no spread)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.config.models import RolloutConfig
from roundhouse.environments.base import TaskRow
from roundhouse.errors import TooFewSequences
from roundhouse.rollout.plan import RolloutSpec, plan_rollouts, sample_tasks
from roundhouse.trajectories.records import Rollout, derive_seed, groups_with_spread


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rounds came to."""

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
) -> Sampled:
    """Roll out `config.prompts_per_iteration` tasks; under dynamic sampling as many a round, until that many groups have spread
    or `max_rounds` are over.

    Raises:
        TooFewSequences: too few groups have spread after the last round, and `on_exhausted` is error.
    """
    policy = config.dynamic_sampling
    rows: list[TaskRow] = []
    rollouts: list[Rollout] = []
    number, found = 0, list[str]()
    while len(found) < config.prompts_per_iteration and number < (1 if policy is None else policy.max_rounds):
        number += 1
        rows += round_tasks(tasks, seed, iteration, config.prompts_per_iteration, number)
        planned = plan_rollouts(rows, config.group_size, seed, iteration)
        rollouts += roll_out(planned[len(rollouts) :])
        found = groups_with_spread(rollouts)
    if policy is None:
        return Sampled(rollouts, number, dynamic=False, kept=[], surplus=[])
    if len(found) < config.prompts_per_iteration and policy.on_exhausted == "error":
        raise TooFewSequences(
            f"iteration {iteration}: {len(found)} of {config.prompts_per_iteration} groups have spread after {number} rounds "
            "(rollout.dynamic_sampling.max_rounds). The tasks are too easy or too hard for this policy: change them, raise "
            "max_rounds or rollout.group_size, or set rollout.dynamic_sampling.on_exhausted to continue."
        )
    return Sampled(
        rollouts,
        number,
        dynamic=True,
        kept=found[: config.prompts_per_iteration],
        surplus=found[config.prompts_per_iteration :],
    )


def round_tasks(tasks: Sequence[TaskRow], seed: int, iteration: int, n: int, number: int) -> list[TaskRow]:
    """The `n` tasks of round `number` (1, 2, …): the iteration's own in the first, each later one in an order of its own."""
    return sample_tasks(
        tasks, seed if number == 1 else derive_seed(seed, "dynamic sampling round", number), iteration, n
    )
