"""A remote agent: POST /run on an agent server plays the whole rollout; what comes back is read, never repaired.

Invariant: a rollout for training has the tokens of its model calls or it fails; where the record of those calls is ambiguous,
the rollout is masked with the reason. The tokens come from the items that the agent returns (agents which echo them), or from
the model server's record of the calls made under the rollout's id (agents which do not).
"""

from __future__ import annotations

from typing import Any, Protocol

from roundhouse.compat.nemo_gym.clients.run_answer import RunAnswer, read_answer, turns_from_items
from roundhouse.compat.nemo_gym.clients.run_request import run_request
from roundhouse.environments.base import TaskRow
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.failures import NoTrainableTokens
from roundhouse.rollout.turns import ChainedCalls, chain_calls
from roundhouse.trajectories.records import Status, Turn

INCOMPLETE_RECORD = "incomplete_record"

NO_TOKENS_IN_ITEMS = (
    "No item of the agent's answer carries generation_token_ids. Either the model server behind the agent does not return "
    "token IDs (ours: return_token_id_information), or the agent does not echo the items as it got them (then record its "
    "calls: environment.tokens=captured), or the first call did not fit the model's context."
)
NO_CALLS_RECORDED = (
    "The model server has no calls on record under this rollout's id. The agent must send its model calls under "
    "/ng-rollout/<_ng_rollout_id>/training-token-capture/ to the server at environment.model_server (NeMo Gym: "
    "token_id_capture)."
)
NO_POLICY_VERSION = (
    "The policy version that answered is unknown: the answer does not tell it and the collector was not told."
)


class RunClient(Protocol):
    """The agent server, and the model server that records."""

    agent_name: str | None
    captures: bool

    def task_index(self, row: TaskRow, group_id: str) -> int: ...

    async def run(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """POST /run; the answer's object.

        Raises:
            InfraError, DataError
        """
        ...

    async def captured_calls(self, rollout_name: str) -> dict[str, Any]:
        """The model server's record of a rollout: `calls`, and whether it is `complete`."""
        ...


class RemoteAgent:
    """The agent of environments that live behind an agent server."""

    def __init__(self, client: RunClient) -> None:
        self._client = client

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        """Send the row, read the rollout."""
        client, rollout = self._client, attempt.rollout
        request = run_request(attempt, client.agent_name, client.task_index(rollout.task, rollout.group_id))
        reply = await attempt.in_environment(client.run(request, attempt.config.timeout_seconds))
        answer = read_answer(reply, rollout.task)
        attempt.response, attempt.answer = answer.response, reply
        rollout.items = answer.items
        rollout.metrics = {"agent_tool_calls": _calls(answer), **answer.verdict.metrics}
        doubt = await self._record_turns(attempt, answer, request["_ng_rollout_id"])
        _judge(attempt, answer, doubt)

    async def _record_turns(self, attempt: RolloutAttempt, answer: RunAnswer, rollout_name: str) -> ChainedCalls | None:
        """Fill in the turns; what is doubtful about them."""
        if self._client.captures:
            chained = await self._captured(attempt, rollout_name)
            turns: list[Turn] = chained.turns
            lacking = NO_CALLS_RECORDED if chained.reason is None else ""
        else:
            chained = ChainedCalls()
            turns = [] if attempt.policy_version is None else turns_from_items(answer.response, attempt.policy_version)
            lacking = NO_POLICY_VERSION if attempt.policy_version is None else NO_TOKENS_IN_ITEMS
        attempt.rollout.turns = turns
        if attempt.on_policy and not turns and lacking:
            raise NoTrainableTokens(lacking)
        return chained if attempt.on_policy and chained.reason is not None else None

    async def _captured(self, attempt: RolloutAttempt, rollout_name: str) -> ChainedCalls:
        record = await attempt.in_environment(self._client.captured_calls(rollout_name))
        chained = chain_calls(record["calls"], attempt.policy_version)
        if record.get("complete") is False and chained.reason is None:
            return ChainedCalls(chained.turns, INCOMPLETE_RECORD, "the model server lost some of the rollout's calls")
        return chained


def _judge(attempt: RolloutAttempt, answer: RunAnswer, doubt: ChainedCalls | None) -> None:
    rollout, verdict = attempt.rollout, answer.verdict
    rollout.reward, rollout.reward_components = verdict.reward, verdict.reward_components
    rollout.finish_reason = answer.finish
    if doubt is not None:
        rollout.status = Status.MASKED
        rollout.failure_code, rollout.failure_detail = f"token_capture_{doubt.reason}", doubt.detail
        rollout.metrics |= {"token_capture_masked": 1.0}
    elif verdict.mask:
        rollout.status = Status.MASKED
    else:
        rollout.status = Status.COMPLETED if answer.finish == "stop" else Status.TRUNCATED


def _calls(answer: RunAnswer) -> float:
    return float(sum(item.get("type") == "function_call" for item in answer.response["output"]))
