"""What an agent server answers to /run, read as a rollout; pure.

Invariant: an answer with a failure mark has no reward, whatever number stands in it; tokens are those that the items carry,
never made from text; numbers of the answer that the row did not hold are the rollout's metrics.

    _ng_failure_terminal                       -> AgentGaveUp (data)
    _ng_failure_class judge_failed             -> JudgeFailed (infra)
    _ng_failure_class, _ng_no_persist          -> AgentFailed (infra)
    mask_sample, instance_config.mask_sample   -> masked
    response.incomplete_details, truncated     -> truncated
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundhouse.compat.nemo_gym.clients.resources import verdict_from_reply
from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.generation.protocol import TOKEN_FIELDS
from roundhouse.rollout.failures import (
    FAILURE,
    TERMINAL,
    AgentFailed,
    AgentGaveUp,
    BadAgentAnswer,
    JudgeFailed,
    detail_of,
)
from roundhouse.rollout.protocol import checked_verdict
from roundhouse.rollout.turns import TurnChain
from roundhouse.trajectories.records import Turn

_CARRIED = frozenset({*TOKEN_FIELDS, "routed_experts"})


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """A rollout as its agent tells it."""

    verdict: Verdict
    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Input and output, without token fields."""
    finish: str
    """stop, length, max_turns or environment."""


def read_answer(reply: Mapping[str, Any], row: TaskRow) -> RunAnswer:
    """The rollout in an answer of status 200.

    Raises:
        AgentFailed, AgentGaveUp, JudgeFailed: it carries a failure mark.
        BadAgentAnswer: it holds no reward or no response.
        BadReward: its numbers are none.
    """
    _refuse_failure(reply)
    response = reply.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if "reward" not in reply or not isinstance(response, dict) or not isinstance(output, list):
        raise BadAgentAnswer(
            f"/run answered without a reward or a response with output items; it holds: {', '.join(map(str, reply))}."
        )
    if not all(isinstance(item, dict) for item in output):
        raise BadAgentAnswer("/run answered with output items that are no objects.")
    verdict = checked_verdict(verdict_from_reply(dict(reply), row))
    instance = reply.get("instance_config")
    if isinstance(instance, dict) and instance.get("mask_sample") is True:
        verdict = Verdict(verdict.reward, verdict.reward_components, verdict.metrics, mask=True)
    return RunAnswer(verdict, response, [*_given(reply, row), *map(_bare, output)], _finish(reply, response, output))


def turns_from_items(response: Mapping[str, Any], policy_version: int) -> list[Turn]:
    """One turn for each output item that carries generated tokens.

    Raises:
        BadAgentAnswer: the three token fields of an item do not belong together.
    """
    chain = TurnChain()
    carrying = [item for item in response["output"] if item.get("generation_token_ids")]
    for item in carrying:
        prompt, generated, log_probs = (item.get(name) for name in TOKEN_FIELDS)
        if not isinstance(prompt, list) or not isinstance(generated, list) or not isinstance(log_probs, list):
            raise BadAgentAnswer(f"An item of type {item.get('type')} carries some of the three token fields only.")
        if len(log_probs) != len(generated) or None in log_probs:
            raise BadAgentAnswer(
                f"An item of type {item.get('type')} carries {len(generated)} generated tokens and {len(log_probs)} "
                "log-probabilities (null among them counts as none)."
            )
        cut_short = item is carrying[-1] and bool(response.get("incomplete_details"))
        called = "tool_calls" if item.get("type") == "function_call" else "stop"
        try:
            chain.add(
                prompt,
                generated,
                log_probs,
                policy_version=policy_version,
                finish_reason="length" if cut_short else called,
            )
        except (TypeError, OverflowError) as error:
            raise BadAgentAnswer(f"prompt_token_ids holds something else than token IDs: {error}") from error
    return chain.turns


def _refuse_failure(reply: Mapping[str, Any]) -> None:
    failure = reply.get(FAILURE)
    if failure is None and not reply.get("_ng_no_persist"):
        return
    text = f"The agent reports {failure or 'a rollout that is not to be kept'}: {detail_of(reply) or 'no detail given'}"
    if reply.get(TERMINAL):
        raise AgentGaveUp(text)
    raise (JudgeFailed if failure == "judge_failed" else AgentFailed)(text)


def _given(reply: Mapping[str, Any], row: TaskRow) -> list[dict[str, Any]]:
    """The input as the agent played it (some add to it), or as the row has it."""
    params = reply.get("responses_create_params")
    given = params.get("input") if isinstance(params, dict) else None
    if not isinstance(given, str | list):
        given = row["responses_create_params"]["input"]
    told = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_bare(item) for item in told if isinstance(item, dict)]


def _bare(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "message", **{key: value for key, value in item.items() if key not in _CARRIED}}


def _finish(reply: Mapping[str, Any], response: Mapping[str, Any], output: list[dict[str, Any]]) -> str:
    if response.get("incomplete_details"):
        return "length"
    if reply.get("truncated") is True:
        return "environment"
    if reply.get("terminated") is not True and output and output[-1].get("type") == "function_call_output":
        return "max_turns"  # the agent stopped before the policy had seen the output
    return "stop"
