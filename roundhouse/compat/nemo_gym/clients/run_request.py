"""The task row as it is sent to an agent server's /run; pure.

Invariant: the agent is told to draw as the run does (`generation.sampling`), with the rollout's own seed; the row's own output
limit stands where it is tighter. `_ng_rollout_id` is new with every attempt, so that model calls which a server records under
it are those of this attempt and no other.

    {"task_id": "a/1", "responses_create_params": {"input": "hi"}}
    -> … + agent_ref, _ng_task_index, _ng_rollout_index, _ng_rollout_id "a-1-0-3f9c…", temperature, top_p, max_output_tokens,
       metadata {"extra_body": "{\\"seed\\": 17}"}
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Any

import orjson

from roundhouse.environments.base import TaskRow
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.failures import BadTaskRow
from roundhouse.rollout.sampling_overrides import sampling_overrides

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
