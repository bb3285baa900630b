"""What an agent server answers to /run; pure functions.

Invariant: a rollout that was judged is answered with the verifier's own words; one that failed is answered with the marks by
which collectors file it (`_ng_failure_class`), and a row cannot bring such marks, or a reward, along. Either has every field of
parameters, response and items that NeMo Gym's rows have; what is unset is null.

    {…row, "response": {…}, "reward": 0.0, "_ng_failure_class": "engine_timeout", "_ng_failure_detail": "…"}

`_ng_failure_terminal: true` stands beside them where trying again cannot help. The reward of 0.0 is a field that the wire
wants; no collector counts it: such rows go to its failures file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.failures import DETAIL, FAILURE, TERMINAL
from roundhouse.rollout.responses import response_object, whole_params, whole_response
from roundhouse.trajectories.records import FailureKind, Status

_RESULT_KEYS = frozenset({"reward", "response", "error", FAILURE, TERMINAL, DETAIL, "_ng_no_persist"})


def without_results(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without what would pass for this server's own word."""
    return {key: value for key, value in row.items() if key not in _RESULT_KEYS}


def run_answer(played: RolloutAttempt) -> dict[str, Any]:
    """What /run answers to a rollout, however it ended."""
    rollout = played.rollout
    if rollout.status is Status.FAILED or played.answer is None:
        terminal = rollout.failure_kind is FailureKind.DATA
        return failed_row(rollout.task, rollout.failure_code, rollout.failure_detail, terminal=terminal)
    told = {"responses_create_params": rollout.task["responses_create_params"], **played.answer}
    params, response = told["responses_create_params"], _with_tokens(told.get("response"), played)
    return {
        **told,
        "responses_create_params": whole_params(params) if isinstance(params, dict) else params,
        "response": None if response is None else whole_response(response),
    }


def failed_row(row: Mapping[str, Any], code: str, detail: str, *, terminal: bool) -> dict[str, Any]:
    """The row with the marks of a failure. Its response is an empty one, since collectors look into it."""
    nothing = {"type": "output_text", "text": "", "annotations": []}
    message = {"type": "message", "id": "msg_failed", "role": "assistant", "status": "completed", "content": [nothing]}
    response = response_object("resp_failed", [message], model="policy", created_at=time.time())
    params = row.get("responses_create_params")
    answered = {
        **row,
        **({"responses_create_params": whole_params(params)} if isinstance(params, dict) else {}),
        "response": whole_response(response),
        "reward": 0.0,
        FAILURE: code,
        DETAIL: detail,
    }
    return answered | {TERMINAL: True} if terminal else answered


def _with_tokens(judged: Any, played: RolloutAttempt) -> Any:
    """The response as the verifier gave it back, with the token fields that were kept from its eyes."""
    ours = played.response_with_tokens()
    output = judged.get("output") if isinstance(judged, dict) else None
    if ours is None or not isinstance(output, list) or len(output) != len(ours["output"]):
        return ours
    marked = list(output)
    for index, fields in played.token_marks:
        marked[index] = {**marked[index], **fields}
    return {**judged, "output": marked}
