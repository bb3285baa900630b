"""The task row as it is sent to an agent server's /run; pure.

Invariant: the agent is told to draw as the run does (`generation.sampling`), with the rollout's own seed; the row's own output
limit stands where it is tighter. `_ng_rollout_id` is new with every attempt, so that model calls which a server records under
it are those of this attempt and no other.

    {"task_id": "a/1", "responses_create_params": {"input": "hi"}}
    -> … + agent_ref, _ng_task_index, _ng_rollout_index, _ng_rollout_id "a-1-0-3f9c…", temperature, top_p, max_output_tokens,
       metadata {"extra_body": "{\"seed\": 17}"}

What an agent server answers to /run, read as a rollout; pure.

Invariant: an answer with a failure mark has no reward, whatever number stands in it; tokens are those that the items carry,
never made from text; numbers of the answer that the row did not hold are the rollout's metrics.

    _ng_failure_terminal                       -> AgentGaveUp (data)
    _ng_failure_class judge_failed             -> JudgeFailed (infra)
    _ng_failure_class, _ng_no_persist          -> AgentFailed (infra)
    mask_sample, instance_config.mask_sample   -> masked
    response.incomplete_details, truncated     -> truncated
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from roundhouse.compat.nemo_gym.clients.resources import verdict_from_reply
from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.generation.protocol import TOKEN_FIELDS
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.failures import (
    FAILURE,
    TERMINAL,
    AgentFailed,
    AgentGaveUp,
    BadAgentAnswer,
    BadTaskRow,
    JudgeFailed,
    detail_of,
)
from roundhouse.rollout.protocol import checked_verdict
from roundhouse.rollout.sampling_overrides import sampling_overrides
from roundhouse.rollout.turns import TurnChain
from roundhouse.trajectories.records import Turn

_LONGEST_NAME = 64


def run_request(attempt: RolloutAttempt, agent: str | None, task_index: int) -> dict[str, Any]:
    """The body of /run.

    Raises:
        BadTaskRow: the row has no usable `responses_create_params`, asks for another distribution than the run's, or names
            another agent.
    """
    rollout = attempt.rollout
    row: TaskRow = rollout.task
    params = row.get("responses_create_params")
    if not isinstance(params, dict) or not isinstance(params.get("input"), str | list):
        raise BadTaskRow("A task row needs responses_create_params.input, a text or a list of items.")
    request = {
        "_ng_task_index": task_index,
        "_ng_rollout_index": rollout.sample,
        **row,
        "_ng_rollout_id": rollout_name(rollout.group_id, rollout.sample),
        "responses_create_params": _sampled_as_the_run(params, attempt),
    }
    request.pop("_ng_attempt_index", None)  # part of the name already
    if agent is not None:
        refuse_other_agents([row], agent)
        request.setdefault("agent_ref", {"type": "responses_api_agents", "name": agent})
    return request


def refuse_other_agents(rows: Iterable[TaskRow], agent: str | None) -> None:
    """One agent plays all rows: the one of the configuration or, where that names none, the one that the rows name.

    Raises:
        BadTaskRow: a row names another; the text names it, and the remedy.
    """
    for row in rows:
        reference = row.get("agent_ref")
        named = reference.get("name") if isinstance(reference, dict) else None
        if named is None:
            continue
        if agent is not None and named != agent:
            raise BadTaskRow(
                f"Task row {row.get('task_id')!r} is for the agent {named!r} (agent_ref.name), but {agent!r} plays the rows of "
                f"this run, and would be given it. Set environment.agent to {named!r} and its server, or keep each agent's "
                "rows in a file of their own."
            )
        agent = named


def rollout_name(group_id: str, sample: int) -> str:
    """A name that can stand in a path, unlike any other: letters, digits, dots, dashes, underscores, a letter first."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", group_id)[:_LONGEST_NAME]
    return f"r-{readable}-{sample}-{uuid.uuid4().hex[:12]}"


def _sampled_as_the_run(params: dict[str, Any], attempt: RolloutAttempt) -> dict[str, Any]:
    sampling = sampling_overrides(params, attempt.sampling, attempt.on_policy).sampling
    return {
        **params,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_output_tokens": sampling.max_new_tokens,
        "metadata": _with_seed(params.get("metadata"), attempt.rollout.seed, sampling.top_k),
    }


def _with_seed(metadata: Any, seed: int, top_k: int | None) -> dict[str, Any]:
    """The metadata with seed and top_k in `extra_body`, a JSON text through which model servers take engine parameters."""
    try:
        given = dict(metadata or {})
        extra = orjson.loads(given.get("extra_body") or "{}")
        extra = {**extra, "seed": seed}
    except (ValueError, TypeError) as error:
        raise BadTaskRow(f"responses_create_params.metadata.extra_body is no JSON object: {error}") from error
    if top_k is not None:
        extra["top_k"] = top_k
    return {**given, "extra_body": orjson.dumps(extra).decode()}


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
