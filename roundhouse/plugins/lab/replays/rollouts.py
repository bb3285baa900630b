"""Play a stored rollout again: the recorded replies of the policy, the present environment.

Invariants: no token is generated. The agent loop is the same as in collection (`roundhouse.rollout.agents`), so the
verifier receives the same input. Before each recorded reply, the environment's answers must equal the recorded ones.
Otherwise, or if the recording cannot be followed to its end, the rollout is refused with a reason and without a
verdict.

    recorded    task  reply 0  tool  reply 1  tool  reply 2  reward
    replayed    task  reply 0  TOOL  reply 1  TOOL  reply 2  VERIFY        CAPITALS: really called, and compared
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

from roundhouse.config.environments import environments_in
from roundhouse.config.models import EnvironmentConfig, Sampling
from roundhouse.config.rollout import RetryPolicy
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import MixtureAgent, open_environment
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient, classify
from roundhouse.rollout.recording import NotRebuilt, Recording
from roundhouse.rollout.rubric import JUDGE_METRICS, JudgedAgent, RubricJudge
from roundhouse.trajectories.foreign_files import NO_REWARD
from roundhouse.trajectories.records import FailureKind, Rollout, Status

CONCURRENCY = 16
"""Number of concurrent rollouts, so that a rollout that waits for a server does not delay the others."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A stored rollout with the present environment's verdict."""

    before: Rollout
    after: Rollout | None
    """With the new reward, components, status and metrics; the turns and items of `before`. None: refused."""
    reason: str = ""
    """Why it was refused: other_answer, ended_early, continues, not_replayable, unclear_turns, or the failure code of the
    environment; `unrewarded` of a rollout that had no reward to begin with, which is left as it is."""
    detail: str = ""
    failure: FailureKind | None = None
    """Kind of failure of a rollout that a rubric could not score; `reason` is its code."""

    @property
    def outcome(self) -> str:
        """equal, flipped, refused or unrewarded."""
        if self.after is None:
            return "unrewarded" if self.reason == "unrewarded" else "refused"
        same = self.before.reward == self.after.reward
        masked = {self.before.status, self.after.status}
        return "equal" if same and (Status.MASKED not in masked or len(masked) == 1) else "flipped"


def open_for_replay(config: EnvironmentConfig, store: str | None = None) -> EnvironmentClient:
    """Open the judging environment; `store` as for `open_environment`.

    Raises:
        ConfigError: it cannot be loaded, or its own loop plays its rollouts and a rubric alone does not judge them, or
            the run's own engine is the judge.
    """
    for key, each in environments_in(config).items():
        rubric = each.rubric
        if each.has_own_loop and (rubric is None or rubric.own_weight):
            raise ConfigError(
                f"{key}.kind is {each.kind}: its own loop plays the rollouts and cannot take recorded replies. "
                "Name the environment behind it: --set environment.kind=remote with its URL, or custom with its "
                f"class; or judge by a rubric alone: --set {key}.rubric=… with own_weight 0."
            )
        if rubric is not None and rubric.judge is not None and rubric.judge.base_url is None:
            raise ConfigError(
                f"{key}.rubric.judge.base_url is unset: the run's engine is the judge, but it does not run here. Name an "
                f"endpoint: --set {key}.rubric.judge.base_url=… and model."
            )
    # An audit watches a policy that learns; stored rollouts keep their audit
    if config.parts:
        parts = {name: each.model_copy(update={"audit": None}) for name, each in config.parts.items()}
        return open_environment(config.model_copy(update={"environments": parts}), store)
    return open_environment(config.model_copy(update={"audit": None}), store)


async def judge(
    rollouts: Iterable[Rollout], environment: EnvironmentClient, seconds: float = 600.0
) -> AsyncIterator[Judged]:
    """Each rollout judged anew, in the order given, `CONCURRENCY` at a time.

    Args:
        seconds: time limit of a rollout.
    """
    waiting: list[asyncio.Task[Judged]] = []
    try:
        for rollout in rollouts:
            waiting.append(asyncio.ensure_future(judge_one(rollout, environment, seconds)))
            if len(waiting) >= CONCURRENCY:
                yield await waiting.pop(0)
        while waiting:
            yield await waiting.pop(0)
    finally:
        for task in waiting:
            task.cancel()


async def judge_one(rollout: Rollout, environment: EnvironmentClient, seconds: float = 600.0) -> Judged:
    """One rollout played again to its verdict."""
    unjudged = rollout.failure_code == NO_REWARD
    if rollout.reward is None and not unjudged:
        return Judged(rollout, None, "unrewarded", f"it is {rollout.status.value}: {rollout.failure_code}")
    if (rubric := judging_alone(environment, rollout)) is not None:
        return await _scored(rollout, rubric, seconds)
    try:
        recording = Recording(rollout, environment)
    except NotRebuilt as error:
        return Judged(rollout, None, error.reason, error.detail)
    spec = RolloutSpec(rollout.group_id, rollout.sample, rollout.task, rollout.seed)
    played = await run_rollout(
        spec,
        recording,
        recording,  # in the place of the environment, of which an attempt uses name and agent
        recording.limits(seconds),
        Sampling(),
        on_policy=False,
        judges_overflow=not rollout.turns,
    )
    refused = recording.refused(played)
    if refused is not None:
        return Judged(rollout, None, refused.reason, refused.detail)
    # The stored rollout with the outcome of the new one. The agent's actions and times are the stored ones
    own = {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}
    verdict = ["status", "reward", "reward_components", "metrics", "finish_reason"]
    if unjudged:
        verdict += ["failure_kind", "failure_code", "failure_detail"]
    return Judged(rollout, Rollout(**own | {name: getattr(played, name) for name in verdict}))


def judging_alone(environment: EnvironmentClient, rollout: Rollout) -> RubricJudge | None:
    """The rubric that judges this rollout without its environment: nothing has to be played again."""
    agent: object = environment.agent
    if isinstance(agent, MixtureAgent):
        agent = agent.of(rollout.task)
    judge = agent.judge if isinstance(agent, JudgedAgent) else None
    return None if judge is None or judge.section.weight_of_environment else judge


async def _scored(rollout: Rollout, rubric: RubricJudge, seconds: float) -> Judged:
    """The stored rollout, scored by a rubric as it stands."""
    if rollout.status is Status.MASKED:
        return Judged(rollout, replace(rollout))
    after = replace(
        rollout, metrics={name: value for name, value in rollout.metrics.items() if name not in JUDGE_METRICS}
    )
    if rollout.failure_code == NO_REWARD:
        after = replace(after, status=Status.COMPLETED, failure_kind=None, failure_code="", failure_detail="")
    try:
        async with asyncio.timeout(seconds):
            await rubric.score(after, RetryPolicy())
    except (InfraError, DataError, TimeoutError) as error:
        kind, code, detail = classify(error)
        return Judged(rollout, None, code, detail, kind)
    return Judged(rollout, after)
