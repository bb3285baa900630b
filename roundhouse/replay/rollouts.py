"""Play a stored rollout again: the recorded replies of the policy, the environment as it is now.

Invariants: no token is generated; the agent loop is the one that collected (`roundhouse.rollout.agents`), so what reaches the
verifier is built as it was then; before each recorded reply, everything that the environment has said must be what it said
when the reply was given. Where it is not, or where the recording cannot be followed to its end, the rollout is refused with a
reason, and has no verdict.

    recorded    task  reply 0  tool  reply 1  tool  reply 2  reward
    replayed    task  reply 0  TOOL  reply 1  TOOL  reply 2  VERIFY        CAPITALS: really called, and compared
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any

from roundhouse.config.environments import OWN_LOOP, MixtureEnvironment, Rubric, environments_in
from roundhouse.config.models import EnvironmentConfig, RolloutConfig, Sampling
from roundhouse.config.rollout import RetryPolicy
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.generation.protocol import Completion, ContextOverflow
from roundhouse.rollout.agents import RolloutAttempt, run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.mixture import MixtureAgent
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient, classify
from roundhouse.rollout.responses import Item, chat_messages
from roundhouse.rollout.rubric import JUDGE_METRICS, JudgedAgent, RubricJudge
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import rebuild_prompts

UNLIMITED = 2**31 - 1
CONCURRENCY = 16
"""Rollouts that are played at a time: one that waits for a server does not keep the others."""


class NotRebuilt(DataError):
    """The environment did not answer as it had, or the recording does not say enough. `reason` is short and stable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Judged:
    """A stored rollout, and what the environment of today makes of it."""

    before: Rollout
    after: Rollout | None
    """With the new reward, components, status and metrics; the turns and items of `before`. None: refused."""
    reason: str = ""
    """Why it was refused: other_answer, ended_early, continues, not_replayable, unclear_turns, or the failure code of the
    environment; `unrewarded` of a rollout that had no reward to begin with, which is left as it is."""
    detail: str = ""
    failure: FailureKind | None = None
    """Of a rollout that a rubric could not score: the kind of that failure, of which `reason` is the code."""

    @property
    def outcome(self) -> str:
        """equal, flipped, refused or unrewarded."""
        if self.after is None:
            return "unrewarded" if self.reason == "unrewarded" else "refused"
        same = self.before.reward == self.after.reward
        masked = {self.before.status, self.after.status}
        return "equal" if same and (Status.MASKED not in masked or len(masked) == 1) else "flipped"


def open_for_replay(config: EnvironmentConfig, store: str | None = None) -> EnvironmentClient:
    """The environment that judges; `store` as of `open_environment`.

    Raises:
        ConfigError: it cannot be loaded, or its rollouts are played by a loop of its own and not judged by a rubric alone, or
            the run's own engine is to judge.
    """
    for key, each in environments_in(config).items():
        rubric = each.rubric
        if each.kind in OWN_LOOP and (rubric is None or rubric.own_weight):
            raise ConfigError(
                f"{key}.kind is {each.kind}: its rollouts are played by a loop of its own, which cannot be given recorded "
                "replies. Name the environment behind it: --set environment.kind=remote with its URL, or custom with its "
                f"class; or judge by a rubric alone: --set {key}.rubric=… with own_weight 0."
            )
        if rubric is not None and rubric.judge is not None and rubric.judge.base_url is None:
            raise ConfigError(
                f"{key}.rubric.judge.base_url is unset: the run's own engine judges, and there is none here. Name an endpoint: "
                f"--set {key}.rubric.judge.base_url=… and model."
            )
    return open_environment(_unaudited(config), store)


def _unaudited(config: EnvironmentConfig) -> EnvironmentConfig:
    """An audit watches a policy that learns; stored rollouts keep what theirs said."""
    if isinstance(config, MixtureEnvironment):
        parts = {name: each.model_copy(update={"audit": None}) for name, each in config.environments.items()}
        return config.model_copy(update={"environments": parts})
    return config.model_copy(update={"audit": None})


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
    if not rollout.status.rewarded or rollout.reward is None:
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
    # The stored rollout with the outcome of the new one. What the agent did and took, it did and took then
    own = {name: getattr(rollout, name) for name in rollout.__dataclass_fields__}
    verdict = ("status", "reward", "reward_components", "metrics", "finish_reason")
    return Judged(rollout, Rollout(**own | {name: getattr(played, name) for name in verdict}))


def judging_alone(environment: EnvironmentClient, rollout: Rollout) -> RubricJudge | None:
    """The rubric that judges this rollout without its environment: nothing has to be played again."""
    agent: object = environment.agent
    if isinstance(agent, MixtureAgent):
        agent = agent.of(rollout.task)
    judge = agent.judge if isinstance(agent, JudgedAgent) else None
    if judge is None:
        return None
    return None if isinstance(judge.section, Rubric) and judge.section.own_weight else judge


async def _scored(rollout: Rollout, rubric: RubricJudge, seconds: float) -> Judged:
    """The stored rollout, scored by a rubric as it stands."""
    if rollout.status is Status.MASKED:
        return Judged(rollout, replace(rollout))
    after = replace(
        rollout, metrics={name: value for name, value in rollout.metrics.items() if name not in JUDGE_METRICS}
    )
    try:
        async with asyncio.timeout(seconds):
            await rubric.score(after, RetryPolicy())
    except (InfraError, DataError, TimeoutError) as error:
        kind, code, detail = classify(error)
        return Judged(rollout, None, code, detail, kind)
    return Judged(rollout, after)


def failed_rollout(rollout: Rollout, kind: FailureKind, code: str, detail: str) -> Rollout:
    """The rollout with this failure in the place of its outcome."""
    return replace(
        rollout,
        status=Status.FAILED,
        reward=None,
        reward_components={},
        finish_reason="",
        failure_kind=kind,
        failure_code=code,
        failure_detail=detail,
    )


class Recording:
    """One stored rollout, in the place of the policy; and its environment with an agent that can be watched."""

    def __init__(self, rollout: Rollout, environment: EnvironmentClient) -> None:
        """
        Raises:
            NotRebuilt: the items do not say which reply is whose, or tools were called that nobody may call again.
        """
        self.name = environment.name
        self._environment = environment
        self._stored = rollout
        self._starts, self._replies = _replies(rollout)
        self._prompts = rebuild_prompts(rollout.turns)
        self._next = 0
        self._live: Rollout | None = None
        self._refused: NotRebuilt | None = None
        acted = any(item.get("type") == "function_call_output" for item in rollout.items)
        if environment.restoration == "none" and acted:
            raise NotRebuilt(
                "not_replayable",
                f"tools were called, and {self.name} does not say that its calls can be made again (restoration is none; of "
                "a server, environment.restore)",
            )

    @property
    def agent(self) -> Recording:
        return self

    async def play(self, attempt: RolloutAttempt, environment: Any) -> None:
        """Play by the environment's own agent."""
        self._live = attempt.rollout
        await self._environment.agent.play(attempt, self._environment)

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """The next recorded reply, where all that came before it is as recorded."""
        number = self._next
        if number == len(self._replies):
            if self._overflowed:
                raise ContextOverflow("as recorded")
            raise self._refuse("continues", f"the rollout had ended after {number} replies, and now goes on")
        self._compare(self._starts[number], f"before reply {number}")
        self._next += 1
        turn = self._stored.turns[number]
        return Completion(
            message=self._replies[number],
            finish_reason=turn.finish_reason,
            prompt_token_ids=self._prompts[number],
            generation_token_ids=turn.generation_token_ids,
            generation_log_probs=turn.generation_log_probs,
            policy_version=turn.policy_version,
            latency_seconds=turn.latency_seconds,
            version_spans=turn.version_spans,
        )

    @property
    def _overflowed(self) -> bool:
        """The recording ended since the next prompt did not fit, rather than within a reply."""
        return self._stored.finish_reason == "max_tokens" and not _is_reply(self._stored.items[-1])

    def limits(self, seconds: float) -> RolloutConfig:
        """The limits under which this recording ends where it ended, whatever the run's were. The row has its system prompt."""
        turns, most = self._stored.turns, UNLIMITED
        if turns and self._stored.finish_reason == "max_tokens" and not self._overflowed:
            used = len(self._prompts[-1]) + len(turns[-1].generation_token_ids)
            full = turns[-1].finish_reason == "length" or bool(self._replies[-1].get("tool_calls"))
            most = used if full else used - 1
        at_limit = self._stored.finish_reason == "max_turns"
        return RolloutConfig.model_construct(
            max_turns=len(turns) if at_limit else len(turns) + 1,
            max_tokens=most,
            timeout_seconds=seconds,
            tool_timeout_seconds=seconds,
            parallel_tool_calls=False,
        )

    def refused(self, played: Rollout) -> NotRebuilt | None:
        """Why the outcome of `played` does not count; None when it does."""
        if self._refused is not None:
            return self._refused
        if played.status is Status.FAILED:
            return NotRebuilt(played.failure_code, played.failure_detail)
        if self._next < len(self._replies):
            return NotRebuilt(
                "ended_early", f"after {self._next} of {len(self._replies)} replies with {played.finish_reason}"
            )
        try:
            self._compare(len(self._stored.items), "at the end")
        except NotRebuilt as error:
            return error
        return None

    def _compare(self, end: int, where: str) -> None:
        """Hold the conversation so far against the first `end` recorded items."""
        assert self._live is not None, "an agent plays before it asks"
        now, then = self._live.items, self._stored.items[:end]
        if len(now) == end and all(_said(one) == _said(other) for one, other in zip(now, then, strict=True)):
            return
        place = next(
            (i for i, pair in enumerate(zip(now, then, strict=False)) if _said(pair[0]) != _said(pair[1])),
            min(len(now), end),
        )
        was = _said(then[place])[:300] if place < end else "nothing"
        found = _said(now[place])[:300] if place < len(now) else "nothing"
        raise self._refuse("other_answer", f"{where}, item {place} was {was!r} and is now {found!r}")

    def _refuse(self, reason: str, detail: str) -> NotRebuilt:
        self._refused = self._refused or NotRebuilt(reason, detail)
        return self._refused


def _replies(rollout: Rollout) -> tuple[list[int], list[dict[str, Any]]]:
    """For each turn, the index of its reply's first item, and the reply as a chat message.

    A reply's items follow one another; where two replies do (a world that answers nothing), a reasoning or message item
    begins the next, since a reply has its thoughts first, then its text, then its calls.
    """
    starts: list[int] = []
    given = rollout.task["responses_create_params"]["input"]
    before = 1 if isinstance(given, str) else len(given)
    rank = 3
    for index, item in enumerate(rollout.items):
        if index < before or not _is_reply(item):
            rank = 3
            continue
        own = {"reasoning": 0, "message": 1}.get(item.get("type", "message"), 2)
        if rank == 3 or own < rank or own == rank < 2:
            starts.append(index)
        rank = own
    if len(starts) != len(rollout.turns):
        raise NotRebuilt("unclear_turns", f"{len(rollout.turns)} turns, and items of {len(starts)} replies")
    replies = []
    for start in starts:
        end = next((i for i in range(start, len(rollout.items)) if not _is_reply(rollout.items[i])), len(rollout.items))
        later = [other for other in starts if start < other < end]
        (message,) = chat_messages(rollout.items[start : min([end, *later])])
        replies.append(message)
    return starts, replies


def _is_reply(item: Item) -> bool:
    kind = item.get("type", "message")
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def _said(item: Item) -> str:
    """What an item says, without its id."""
    return repr({key: value for key, value in item.items() if key not in ("id", "status")})
