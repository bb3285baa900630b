"""Branch a turn: a stored rollout goes on from one of its turns with a live policy.

Invariants: the replies before that turn are the recorded ones, and everything that the environment says before it is what it
said then, else the branch is refused with the reason; only the turns from there on are generated, and only they are trained on.
The branches of one turn are a group, so an algorithm that compares a group's rewards gives branch-relative advantages.

    recorded         task  reply 0  tool  reply 1  tool  reply 2   reward
    branch at 1      task  reply 0  TOOL  REPLY 1  TOOL  REPLY 2   VERIFY      CAPITALS: made now

A version of the dataset is of one policy version: `datasets/<name>/<run>-i000012-v000015-<digest>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundhouse.activity import run_interruptible
from roundhouse.config.loading import config_digest, digest_of_tree
from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.errors import DataError, StoreError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.protocol import Completion, PolicyClient, policy_of
from roundhouse.replay.rollouts import NotRebuilt, Recording, failed_rollout, open_for_replay
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.lineage import code_version
from roundhouse.store.location import Location
from roundhouse.store.manifest import Provenance, Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, StageKind
from roundhouse.trajectories.ledger import Ledger
from roundhouse.trajectories.records import FailureKind, Rollout, Status, derive_seed
from roundhouse.trajectories.schemas import rollouts_table, turns_table


class Branch(Recording):
    """A stored rollout up to one of its turns, in the place of the policy; a live policy from there."""

    def __init__(self, rollout: Rollout, environment: EnvironmentClient, turn: int, policy: PolicyClient) -> None:
        """
        Raises:
            NotRebuilt: as of `Recording`; or the rollout has no such turn.
        """
        super().__init__(rollout, environment)
        if not 0 <= turn < len(rollout.turns):
            raise NotRebuilt(
                "no_such_turn", f"{rollout.rollout_id} has the turns 0 to {len(rollout.turns) - 1}, not {turn}"
            )
        self._turn, self._policy = turn, policy

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """The next recorded reply; from the branch on, the policy's."""
        if self._next < self._turn:
            return await super().complete(messages, tools, sampling, seed)
        if self._next == self._turn:
            self._compare(self._starts[self._turn], f"before reply {self._turn}")
            self._next += 1
        return await self._policy.complete(messages, tools, sampling, seed)

    def refused(self, played: Rollout) -> NotRebuilt | None:
        """Why there is no branch; None where the policy was asked, whatever came of it."""
        if self._refused is not None or self._next > self._turn:
            return self._refused
        if played.status is Status.FAILED:
            return NotRebuilt(played.failure_code, played.failure_detail)
        return NotRebuilt("ended_early", f"after {self._next} replies with {played.finish_reason}")


async def branch_one(
    rollout: Rollout,
    turn: int,
    sample: int,
    environment: EnvironmentClient,
    policy: PolicyClient,
    config: RolloutConfig,
    sampling: Sampling,
) -> Rollout:
    """One branch of a stored rollout. Where it cannot be rebuilt, a failed rollout with the code `not_rebuilt`."""
    group = f"{rollout.rollout_id}@{turn}"
    spec = RolloutSpec(group, sample, rollout.task, derive_seed(rollout.seed, "branch", turn, sample))
    try:
        branch = Branch(rollout, environment, turn, policy_of(spec.rollout_id, policy))
        played = await run_rollout(spec, branch, branch, config, sampling, on_policy=False)
        refused = branch.refused(played)
    except NotRebuilt as error:
        refused = error
        played = Rollout(group, sample, rollout.task, rollout.environment, Status.FAILED, seed=spec.seed)
    if refused is not None:
        return replace(failed_rollout(played, FailureKind.DATA, "not_rebuilt", str(refused)), turns=[])
    turns = [replace(each, trained=each.turn >= turn) for each in played.turns]
    return replace(played, turns=turns)


@dataclass(frozen=True, slots=True)
class Branched:
    """What came of it."""

    version: Reference
    """Of the dataset."""
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
) -> Branched:
    """Let stored rollouts of an iteration go on from a turn, and store the branches as a version of the dataset `name`.

    Args:
        checkpoint: of the policy version that the engine at `engine_url` holds.

    Raises:
        StoreError: the iteration has no collection, or not these rollouts.
        ConfigError: the environment cannot be given recorded replies.
        DataError: no rollout could be rebuilt; nothing is stored.
    """
    chosen = stored_rollouts(run, iteration, rollout_ids)
    request = {"rollouts": list(rollout_ids), "turn": turn, "samples": samples}
    version = checkpoint.policy_version
    label = f"{run.run_id}-i{iteration:06d}-v{version:06d}-{digest_of_tree(request)[:8]}"
    place = Location(run.config.store) / f"datasets/{name}/{label}"
    stage = Stage(place, kind=StageKind.COLLECT, run_id=run.run_id, iteration=iteration)
    if (done := stage.reference()) is None:
        config = run.config

        async def work() -> list[Rollout]:
            async with (
                open_for_replay(config.environment) as world,
                HttpPolicyClient(engine_url, config.generation) as policy,
            ):
                asked = config.generation.sampling
                return [
                    await branch_one(each, turn, sample, world, policy, config.rollout, asked)
                    for each in chosen
                    for sample in range(samples)
                ]

        made = run_interruptible(work())
        if all(each.failure_code == "not_rebuilt" for each in made):
            raise DataError(f"No rollout could be rebuilt up to turn {turn}. The first: {made[0].failure_detail}")
        done = _commit(run, stage, checkpoint, made, request)
    made = read_rollouts(done)
    return _outcome(done, chosen, made, turn)


def stored_rollouts(run: Run, iteration: int, rollout_ids: Sequence[str]) -> list[Rollout]:
    """The rollouts of an iteration's collection with these ids, in their order.

    Raises:
        StoreError: it has no collection, or one of them is not in it; some of those that are get listed.
    """
    collection = run.stage(iteration, StageKind.COLLECT).reference()
    if collection is None:
        raise StoreError(f"Run {run.run_id!r} has no complete collection of iteration {iteration}.")
    by_id = {each.rollout_id: each for each in read_rollouts(collection)}
    if missing := [each for each in rollout_ids if each not in by_id]:
        some = ", ".join(list(by_id)[:5])
        raise StoreError(f"Iteration {iteration} has no rollout {missing[0]!r}. It has {len(by_id)}, such as {some}.")
    return [by_id[each] for each in rollout_ids]


def _commit(run: Run, stage: Stage, checkpoint: Reference, made: list[Rollout], request: dict[str, Any]) -> Reference:
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
    rewards = [each.reward for each in made if each.reward is not None]
    collection = run.stage(stage.iteration, StageKind.COLLECT).reference()
    assert collection is not None, "its rollouts were read"
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


def _outcome(version: Reference, chosen: Sequence[Rollout], made: Sequence[Rollout], turn: int) -> Branched:
    rewards: dict[str, list[float]] = {each.rollout_id: [] for each in chosen}
    for each in made:
        if each.reward is not None:
            rewards[each.group_id.rpartition("@")[0]].append(each.reward)
    return Branched(
        version=version,
        rewards=rewards,
        before={each.rollout_id: each.reward for each in chosen},
        reasons=dict(Counter(each.failure_code for each in made if each.status is Status.FAILED)),
        generated_tokens=sum(len(one.generation_token_ids) for each in made for one in each.turns if one.turn >= turn),
    )
