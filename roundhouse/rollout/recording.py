"""A stored rollout in the place of the policy: its recorded replies up to its end, or up to a turn from which a live policy
answers (a branch).

Invariants: the agent loop is the one that collected (`roundhouse.rollout.agents`), so that what reaches the verifier is built
as it was then; before each recorded reply, everything that the environment has said must be what it said when the reply was
given, else the rollout is refused with a reason. Of a branch the policy makes the turns from there on alone, and only these
are trained on.

    recorded         task  reply 0  tool  reply 1  tool  reply 2  reward
    Recording        task  reply 0  TOOL  reply 1  TOOL  reply 2  VERIFY        CAPITALS: really called, and compared
    Branch at 1      task  reply 0  TOOL  REPLY 1  TOOL  REPLY 2  VERIFY
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.errors import DataError
from roundhouse.generation.protocol import Completion, ContextOverflow, PolicyClient, policy_of
from roundhouse.rollout.agents import RolloutAttempt, run_rollout
from roundhouse.rollout.plan import BranchPoint, RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.rollout.responses import Item, chat_messages
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import rebuild_prompts

UNLIMITED = 2**31 - 1


class NotRebuilt(DataError):
    """The environment did not answer as it had, or the recording does not say enough. `reason` is short and stable."""

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


class Branch(Recording):
    """A stored rollout up to one of its turns, in the place of the policy; a live policy from there."""

    def __init__(self, point: BranchPoint, environment: EnvironmentClient, policy: PolicyClient) -> None:
        """
        Raises:
            NotRebuilt: as of `Recording`; or the rollout has no such turn.
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
        """Play by the environment's own agent; once more, where an interrupted attempt's calls did not fit."""
        self._refused, self._asked = None, False
        attempt.engine = self._policy
        await super().play(attempt, environment)

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """The next recorded reply; from the branch on, the policy's."""
        assert self._live is not None, "an agent plays before it asks"
        self._next = len(self._live.turns)  # those that a journal has answered never came here
        if self._next < self._turn:
            return await super().complete(messages, tools, sampling, seed)
        if self._next == self._turn:
            self._compare(self._starts[self._turn], f"before reply {self._turn}")
        self._asked = True
        return await self._policy.complete(messages, tools, sampling, seed)

    def refused(self, played: Rollout) -> NotRebuilt | None:
        """Why there is no branch; None where the policy was asked, whatever came of it, and of a failure of infrastructure,
        after which another attempt may get there."""
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
    """One attempt at a branch (`spec.branch`); its recorded turns are not trained on. Arguments as of `play_rollout`.

    Where the recording cannot be followed to the turn, a failed rollout with the code `not_rebuilt`, a data failure.
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
