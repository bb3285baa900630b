"""Replay a stored rollout as the policy, completely or up to the turn at which a live policy takes over (a branch).

Invariants: the agent loop is the same as in collection (`roundhouse.rollout.agents`), so the verifier receives the same
input. Before each recorded reply, the environment's answers must equal the recorded ones; otherwise the rollout is
refused with a reason.

    recorded         task  reply 0  tool  reply 1  tool  reply 2  reward
    Recording        task  reply 0  TOOL  reply 1  TOOL  reply 2  VERIFY        CAPITALS: really called, and compared
    Branch at 1      task  reply 0  TOOL  REPLY 1  TOOL  REPLY 2  VERIFY

`rollout.branching` samples branches of some rollouts after an iteration's rollouts are complete. The choice of turns is
a pure function of the section, (run seed, iteration) and the stored rollouts, so a resumed stage makes the same choice.
Each branch is a rollout of the same stage and policy version. Only its new turns are generated and trained on.

    group a (rewards 1 0 0)     a/0 ── a/1 ── a/2        rollouts 1, samples 4: a/1 is drawn, and its turn 2
    group a/1@2                 a/1@2/0 … a/1@2/3        four new ends, compared with each other and with a/1
    group b (rewards 0 0 0)     skipped: without spread it has no gradient

Several ends of one state estimate its value without a critic (VinePPO, arXiv 2410.01679). Branch points are drawn at
random or at the highest uncertainty after an observation (ARPO, arXiv 2507.19849, section 3; TreeRL, arXiv 2506.11902).
The uncertainty is the mean of -log p over the first sampled tokens, a one-sample estimate of the entropy, because the
store does not hold distributions.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.config.rollout import LARGEST_REWARD, Branching
from roundhouse.errors import DataError
from roundhouse.generation.protocol import Completion, ContextOverflow, PolicyClient, policy_of
from roundhouse.rollout.agents import RolloutAttempt, run_rollout
from roundhouse.rollout.plan import BranchPoint, RolloutSpec, Sampled, branch_spec
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.rollout.responses import Item, chat_messages
from roundhouse.trajectories.records import (
    FailureKind,
    Rollout,
    Status,
    Turn,
    derive_seed,
    groups_with_spread,
    has_spread,
)
from roundhouse.trajectories.schemas import rebuild_prompts

UNLIMITED = 2**31 - 1


class NotRebuilt(DataError):
    """The environment's answers differ from the recording, or the recording is incomplete. `reason` is short and
    stable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


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
        """Read the replies and answers of a stored rollout.

        Raises:
            NotRebuilt: replies cannot be told apart in the items, or a called tool must not be called again.
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
                f"tools were called, and {self.name} does not declare that its calls can be repeated (restoration is none; of "
                "a server, environment.restore)",
            )

    @property
    def agent(self) -> Recording:
        return self

    def __getattr__(self, name: str) -> Any:
        """Sessions are begun, and restored, as the environment itself does."""
        return getattr(self._environment, name)

    async def play(self, attempt: RolloutAttempt, environment: Any) -> None:
        """Play by the environment's own agent."""
        self._live = attempt.rollout
        await self._environment.agent.play(attempt, environment)

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """Return the next recorded reply if everything before it equals the recording."""
        number = self._next
        if number == len(self._replies):
            if self._overflowed:
                raise ContextOverflow("as recorded")
            raise self._refuse("continues", f"the rollout had ended after {number} replies, and now continues")
        self._compare(self._starts[number], f"before reply {number}")
        self._next += 1
        reply = self._replies[number]
        if not self._stored.turns:  # imported without tokens
            return Completion(
                message=reply,
                finish_reason="tool_calls" if reply.get("tool_calls") else "stop",
                prompt_token_ids=[],
                generation_token_ids=[],
                generation_log_probs=[],
                policy_version=0,
                latency_seconds=0.0,
            )
        turn = self._stored.turns[number]
        return Completion(
            message=reply,
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
        """Return limits under which this recording ends at its recorded end, whatever limits the run had. The row has
        its system prompt."""
        turns, most, replies = self._stored.turns, UNLIMITED, len(self._replies)
        if turns and self._stored.finish_reason == "max_tokens" and not self._overflowed:
            used = len(self._prompts[-1]) + len(turns[-1].generation_token_ids)
            full = turns[-1].finish_reason == "length" or bool(self._replies[-1].get("tool_calls"))
            most = used if full else used - 1
        at_limit = self._stored.finish_reason == "max_turns"
        return RolloutConfig.model_construct(
            max_turns=replies if at_limit else replies + 1,
            max_tokens=most,
            timeout_seconds=seconds,
            tool_timeout_seconds=seconds,
            parallel_tool_calls=False,
            reward_limit=LARGEST_REWARD,
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
        answer = _said(now[place])[:300] if place < len(now) else "nothing"
        raise self._refuse("other_answer", f"{where}, item {place} was {was!r} and is now {answer!r}")

    def _refuse(self, reason: str, detail: str) -> NotRebuilt:
        self._refused = self._refused or NotRebuilt(reason, detail)
        return self._refused


class Branch(Recording):
    """A stored rollout up to one of its turns, in the place of the policy; a live policy from there."""

    def __init__(self, point: BranchPoint, environment: EnvironmentClient, policy: PolicyClient) -> None:
        """Prepare the branch at a turn of a stored rollout.

        Raises:
            NotRebuilt: see `Recording`; or the rollout does not have this turn.
        """
        rollout, turn = point.rollout, point.turn
        super().__init__(rollout, environment)
        if not 0 <= turn < len(rollout.turns):
            raise NotRebuilt(
                "no_such_turn", f"{rollout.rollout_id} has the turns 0 to {len(rollout.turns) - 1}, not {turn}"
            )
        self._turn, self._policy = turn, policy
        self._asked = False

    async def play(self, attempt: RolloutAttempt, environment: Any) -> None:
        """Play with the environment's agent. Play again if the calls of an interrupted attempt diverge."""
        self._refused, self._asked = None, False
        attempt.engine = self._policy
        await super().play(attempt, environment)

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """The next recorded reply; from the branch on, the policy's."""
        assert self._live is not None, "an agent plays before it asks"
        self._next = len(self._live.turns)  # the journal answers calls before they reach this client
        if self._next < self._turn:
            return await super().complete(messages, tools, sampling, seed)
        if self._next == self._turn:
            self._compare(self._starts[self._turn], f"before reply {self._turn}")
        self._asked = True
        return await self._policy.complete(messages, tools, sampling, seed)

    def refused(self, played: Rollout) -> NotRebuilt | None:
        """Return the reason why the branch was not made.

        None if the policy was asked, whatever the result, and after infrastructure failures, because another attempt
        may succeed.
        """
        if self._refused is not None or self._asked or len(played.turns) > self._turn:
            return self._refused
        if played.status is not Status.FAILED:
            return NotRebuilt("ended_early", f"after {len(played.turns)} replies with {played.finish_reason}")
        if played.failure_kind is FailureKind.INFRA:
            return None
        return NotRebuilt(played.failure_code, played.failure_detail)


async def run_branch(
    spec: RolloutSpec,
    policy: PolicyClient,
    environment: EnvironmentClient,
    config: RolloutConfig,
    sampling: Sampling,
    attempt: int = 1,
    **options: Any,
) -> Rollout:
    """Attempt a branch (`spec.branch`) without training on its recorded turns. See `play_rollout` for the arguments.

    If the recording cannot be followed to the turn, return a failed rollout with the code `not_rebuilt`, a data
    failure.
    """
    point = spec.branch
    assert point is not None, "other rollouts are run by run_rollout"
    try:
        branch = Branch(point, environment, policy_of(spec.rollout_id, policy))
        played = await run_rollout(spec, branch, branch, config, sampling, attempt, **options)
        refused = branch.refused(played)
    except NotRebuilt as error:
        refused = error
        played = Rollout(
            spec.group_id, spec.sample, spec.row, point.rollout.environment, Status.FAILED, attempt, spec.seed
        )
    played.branched_from = point.rollout.rollout_id
    if refused is not None:
        return replace(failed_rollout(played, FailureKind.DATA, "not_rebuilt", str(refused)), turns=[])
    return replace(played, turns=[replace(each, trained=each.turn >= point.turn) for each in played.turns])


def _replies(rollout: Rollout) -> tuple[list[int], list[dict[str, Any]]]:
    """Return, per turn, the index of its reply's first item and the reply as a chat message.

    The items of a reply are adjacent. Between two adjacent replies (the environment answered nothing), a reasoning or
    message item begins the next reply, because a reply has thoughts first, then text, then calls.
    """
    starts: list[int] = []
    initial = rollout.task["responses_create_params"]["input"]
    before = 1 if isinstance(initial, str) else len(initial)
    rank = 3
    for index, item in enumerate(rollout.items):
        if index < before or not _is_reply(item):
            rank = 3
            continue
        own = {"reasoning": 0, "message": 1}.get(item.get("type", "message"), 2)
        if rank == 3 or own < rank or own == rank < 2:
            starts.append(index)
        rank = own
    if rollout.turns and len(starts) != len(rollout.turns):
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
    """Return an item's content without its ID."""
    return repr({key: value for key, value in item.items() if key not in ("id", "status")})


FIRST_TOKENS = 16
"""Number of first tokens of a turn that measure the policy's uncertainty. Later tokens mostly follow from the
beginning."""


def branch_points(
    rollouts: Sequence[Rollout], groups: Collection[str], config: Branching, seed: int, iteration: int
) -> list[BranchPoint]:
    """The turns to branch: of each of the `groups` up to `config.rollouts`, of rollouts with a reward and two turns or more.

    A first turn is never branched: its branches would be rollouts of the task, as `rollout.group_size` has them.
    """
    candidates: dict[str, list[Rollout]] = {group: [] for group in groups}
    for rollout in rollouts:
        if rollout.status.counted and len(rollout.turns) > 1 and rollout.group_id in candidates:
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
    """Return an iteration's groups with spread; under dynamic sampling, only the kept ones."""
    return sampled.kept if sampled.dynamic else groups_with_spread(sampled.rollouts)


def plan_branches(
    rollouts: Sequence[Rollout],
    groups: Collection[str],
    config: Branching,
    seed: int,
    iteration: int,
    taken: Container[str] = (),
) -> list[RolloutSpec]:
    """Return `config.samples` branches of each of the `branch_points`; `rollouts` are whole.

    Args:
        taken: ids of the iteration's groups.
    """
    points, samples = branch_points(rollouts, groups, config, seed, iteration), range(config.samples)
    return [branch_spec(point.rollout, point.turn, sample, taken) for point in points for sample in samples]


@dataclass(frozen=True, slots=True)
class Branched:
    """Branches of an iteration with their counts."""

    specs: Sequence[RolloutSpec]
    rollouts: Sequence[Rollout]
    """In the order of the specs."""

    @property
    def points(self) -> dict[str, BranchPoint]:
        """By the id of the rollout that was branched."""
        return {spec.branch.rollout.rollout_id: spec.branch for spec in self.specs if spec.branch is not None}

    def metrics(self) -> dict[str, float]:
        """Return metrics of the branches alone."""
        points = self.points
        rewards = {name: point.rollout.counted_reward for name, point in points.items()}
        before = {name: reward for name, reward in rewards.items() if reward is not None}
        ends: dict[str, list[float]] = {name: [] for name in points}
        for each in self.rollouts:
            if (reward := each.counted_reward) is not None and each.branched_from is not None:
                ends[each.branched_from].append(reward)
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
        return {"branching": {name: point.turn for name, point in self.points.items()}}
