"""Branch a turn: a live policy continues a stored rollout from one of its turns
(`roundhouse.rollout.recording.Branch`).

Invariants: the result is a version of a dataset, of one policy version:
`datasets/<name>/<run>-i000012-v000015-<digest>`. The branches of one turn are a group, so an algorithm that compares a
group's rewards gives branch-relative advantages. `rollout.branching` makes branches inside a training run
(`roundhouse.rollout.recording`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.activity import run_interruptible
from roundhouse.config.loading import config_digest, digest_of_tree
from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.errors import DataError, StoreError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.protocol import PolicyClient
from roundhouse.plugins.lab.replays.rollouts import open_for_replay
from roundhouse.plugins.lab.replays.verdicts import refuse_other_collection
from roundhouse.rollout.plan import branch_spec
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.rollout.recording import run_branch
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.lineage import code_version
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.store.stage import Provenance, Reference, Stage, StageKind
from roundhouse.trajectories.records import Ledger, Rollout, Status
from roundhouse.trajectories.schemas import recorded_rollout, rollouts_table, turns_table


async def branch_one(
    rollout: Rollout,
    turn: int,
    sample: int,
    environment: EnvironmentClient,
    policy: PolicyClient,
    config: RolloutConfig,
    sampling: Sampling,
) -> Rollout:
    """Play one branch of a stored rollout. If it cannot be rebuilt, return a failed rollout with the code
    `not_rebuilt`."""
    spec = branch_spec(rollout, turn, sample)
    return await run_branch(spec, policy, environment, config, sampling, on_policy=False)


@dataclass(frozen=True, slots=True)
class BranchOutcome:
    """Result of branching."""

    version: Reference
    """Version of the dataset."""
    rewards: dict[str, list[float]]
    """By stored rollout, of its branches."""
    before: dict[str, float | None]
    """By stored rollout, its own reward."""
    reasons: dict[str, int]
    """Branches that failed, by code."""
    generated_tokens: int
    """By the policy, in the new turns alone."""


def branch(
    run: Run,
    iteration: int,
    rollout_ids: Sequence[str],
    turn: int,
    name: str,
    engine_url: str,
    checkpoint: Reference,
    samples: int = 4,
) -> BranchOutcome:
    """Branch stored rollouts of an iteration at a turn, and store the branches as a version of the dataset `name`.

    Args:
        checkpoint: of the policy version that the engine at `engine_url` holds.

    Raises:
        StoreError: the iteration lacks a collection or these rollouts; or `name` holds such branches of another
            collection.
        ConfigError: the environment cannot be given recorded replies.
        DataError: all branches failed, as for rollouts that cannot be rebuilt; nothing is stored.
    """
    collection = _collection(run, iteration)
    chosen = stored_rollouts(run, iteration, rollout_ids)
    request = {"rollouts": list(rollout_ids), "turn": turn, "samples": samples}
    version = checkpoint.policy_version
    label = f"{run.run_id}-i{iteration:06d}-v{version:06d}-{digest_of_tree(request)[:8]}"
    place = Location(run.config.store) / f"datasets/{name}/{label}"
    stage = Stage(place, kind=StageKind.COLLECT, run_id=run.run_id, iteration=iteration)
    if (reference := stage.reference()) is None:
        config = run.config

        async def work() -> list[Rollout]:
            async with (
                open_for_replay(config.environment) as world,
                HttpPolicyClient(engine_url, config.generation) as policy,
            ):
                sampling = config.generation.sampling
                return [
                    recorded_rollout(await branch_one(each, turn, sample, world, policy, config.rollout, sampling))[0]
                    for each in chosen
                    for sample in range(samples)
                ]

        new = run_interruptible(work())
        if all(each.status is Status.FAILED for each in new):
            raise DataError(
                f"No branch from turn {turn} has an outcome. The first: {new[0].failure_code}: {new[0].failure_detail}"
            )
        reference = commit_branch(run, stage, checkpoint, collection, new, request)
    refuse_other_collection(reference, collection, "branches")
    new = read_rollouts(reference)
    return _outcome(reference, chosen, new)


def stored_rollouts(run: Run, iteration: int, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Return the rollouts of an iteration's collection with these IDs, in their order.

    Raises:
        StoreError: the collection is missing or lacks one of them; the text lists some existing IDs.
    """
    by_id = {each.rollout_id: each for each in read_rollouts(_collection(run, iteration))}
    if missing := [each for each in rollout_ids if each not in by_id]:
        some = ", ".join(list(by_id)[:5])
        raise StoreError(f"Iteration {iteration} has no rollout {missing[0]!r}. It has {len(by_id)}, such as {some}.")
    return [by_id[each] for each in rollout_ids]


def _collection(run: Run, iteration: int) -> Reference:
    collection = run.stage(iteration, StageKind.COLLECT).reference()
    if collection is None:
        raise StoreError(f"Run {run.run_id!r} has no complete collection of iteration {iteration}.")
    return collection


def commit_branch(
    run: Run,
    stage: Stage,
    checkpoint: Reference,
    collection: Reference,
    made: list[Rollout],
    request: dict[str, Any],
) -> Reference:
    attempt = stage.begin(
        Provenance(
            policy_version=checkpoint.policy_version,
            config_digest=config_digest(run.config),
            code_version=code_version(),
            seed=run.config.seed,
        )
    )
    attempt.write_table("turns", turns_table(made))
    attempt.write_table("rollouts", rollouts_table(made))
    ledger = Ledger.from_rollouts(made, requested=len(made))
    rewards = [reward for each in made if (reward := each.counted_reward) is not None]
    return attempt.commit(
        inputs={"weights": checkpoint, "rollouts": collection},
        counts=ledger.counts(),
        metrics={"reward/mean": sum(rewards) / len(rewards)} if rewards else {},
        details={
            "failures": ledger.failures,
            "branched": request,
            "sampling": run.config.generation.sampling.model_dump(),
        },
    )


def _outcome(version: Reference, chosen: Sequence[Rollout], made: Sequence[Rollout]) -> BranchOutcome:
    rewards: dict[str, list[float]] = {each.rollout_id: [] for each in chosen}
    for each in made:
        if (reward := each.counted_reward) is not None and each.branched_from is not None:
            rewards[each.branched_from].append(reward)
    return BranchOutcome(
        version=version,
        rewards=rewards,
        before={each.rollout_id: each.reward for each in chosen},
        reasons=dict(Counter(each.failure_code for each in made if each.status is Status.FAILED)),
        generated_tokens=sum(each.generated_tokens for each in made),
    )
