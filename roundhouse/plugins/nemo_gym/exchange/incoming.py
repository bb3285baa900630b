"""Convert a row of NeMo Gym's rollouts JSONL or failures sidecar to a rollout record; pure functions.

Invariant: `restored_row(record, remnant)` equals the row, value by value. The record holds the data for training and
people; the remnant holds the rest of the row: the task's fields, the conversation, the token arrays.

Rows that `outgoing` wrote carry the whole record and come back unchanged. Foreign rows:

    reward, mask_sample, response.status   ->  completed, truncated or masked
    _ng_failure_class, or no reward        ->  failed; `_ng_failure_terminal` and missing rewards are the data's fault
    items with the three token fields      ->  turns; a prompt stores what it adds to the turn before, or begins a new root
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from roundhouse.errors import DataError
from roundhouse.generation.protocol import TOKEN_FIELDS
from roundhouse.plugins.nemo_gym.exchange.json_lines import Row
from roundhouse.plugins.nemo_gym.exchange.outgoing import (
    ATTEMPT,
    OWN,
    SCALARS,
    TURN_SCALARS,
    VERSION,
    Item,
    carries_tokens,
    input_items,
    is_index,
    task_under,
    with_tokens,
)
from roundhouse.rollout.conversation import TurnChain
from roundhouse.rollout.protocol import DETAIL, FAILURE, TERMINAL, detail_of
from roundhouse.trajectories.foreign_files import NO_REWARD
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn
from roundhouse.trajectories.schemas import rebuild_prompts

RESULT_FIELDS = frozenset(
    {
        "response",
        "reward",
        "reward_components",
        "metrics",
        "mask_sample",
        FAILURE,
        TERMINAL,
        DETAIL,
        "_ng_token_capture",
    }
    | {"_ng_no_persist", "_ng_failure_judge_error", "ng_model_call_capture", "ng_agent_observations", "ng_trajectory"}
)
"""Fields of a row about a rollout's result, not about its task."""


@dataclass(frozen=True, slots=True)
class Remnant:
    """Part of a foreign row without a place in the record."""

    row: Row
    """The row; fields that the task holds are null, and so is `response.output` if the record's items hold it."""
    from_task: list[str] = field(default_factory=list)
    """Fields to take from the task."""
    given: int | None = None
    """Number of the record's items that are the task's input; None if the output is in the row."""
    turn_items: list[int] = field(default_factory=list)
    """For each turn, the place in the output of the item with its tokens."""
    log_probs: dict[str, list[float]] = field(default_factory=dict)
    """By turn, log-probabilities that are not 32-bit floats: the record holds the nearest."""


def is_own(row: Row) -> bool:
    """Return whether Roundhouse wrote the row."""
    own = row.get(OWN)
    return isinstance(own, dict) and own.get("version") == VERSION and "added" in own


def rollout_of(row: Row) -> Rollout:
    """The record of a row that `outgoing.result_row` wrote.

    Raises:
        DataError: the fields under `_roundhouse` are not those of a record.
    """
    try:
        own = row[OWN]
        task = task_under(row)
        written = {*own["added"], *own["replaced"]}
        output = list(row["response"]["output"])
        prompts: list[list[int]] = []
        turns: list[Turn] = []
        for number, each in enumerate(own["turns"]):  # their token fields are taken off the output
            place, parent = each["item"], each["parent"]
            carrier = each if place is None else output[place]
            prompt, generated, log_probs = (carrier[name] for name in TOKEN_FIELDS)
            before = 0 if parent is None else len(prompts[parent]) + len(turns[parent].generation_token_ids)
            fields = {name: each[name] for name in TURN_SCALARS if name in each}
            turns.append(Turn(number, prompt_token_ids=prompt[before:], generation_token_ids=generated,
                              generation_log_probs=log_probs, **fields))  # fmt: skip
            prompts.append(prompt)
            if place is not None:
                output[place] = {name: value for name, value in carrier.items() if name not in TOKEN_FIELDS}
        return Rollout(
            **{name: own[name] for name in SCALARS if name in own},
            task=task,
            status=Status(own["status"]),
            failure_kind=FailureKind(own["failure_kind"]) if own["failure_kind"] else None,
            reward=row["reward"] if "reward" in written else None,
            reward_components=row["reward_components"] if "reward_components" in written else {},
            metrics=row["metrics"] if "metrics" in written else {},
            items=(input_items(task) if own["input_in_task"] else []) + output,
            turns=turns,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            f"The row's {OWN} is damaged: {error!r}. Remove the key to read the row as a foreign one."
        ) from error


def foreign_rollout(
    row: Row, task: Row | None = None, *, key: tuple[int, int], policy_version: int = 0
) -> tuple[Rollout, Remnant]:
    """Return the record of a row that another program wrote, and the remnant.

    Args:
        task: the rollout's row of the materialized inputs; by default the row without its result.
        key: task and rollout index.
        policy_version: version of the weights; the row does not have it.
    """
    own_task = task if task is not None else {name: value for name, value in row.items() if name not in RESULT_FIELDS}
    begin = input_items(own_task)
    response = row.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    output = output if isinstance(output, list) and all(isinstance(item, dict) for item in output) else None
    calls = _Calls(output or [], policy_version, _incomplete(response))
    agent = row.get("agent_ref")
    rollout = Rollout(
        group_id=str(own_task.get("task_id", f"task-{key[0]}")),
        sample=key[1],
        task=own_task,
        environment=agent["name"] if isinstance(agent, dict) and isinstance(agent.get("name"), str) else "nemo-gym",
        status=Status.FAILED,
        attempt=1 + (row[ATTEMPT] if is_index(row.get(ATTEMPT)) else 0),
        items=begin + calls.items,
        turns=calls.turns,
    )
    _judge(rollout, row, known=task or {}, malformed=calls.malformed, incomplete=_incomplete(response))
    input_count = None if output is None else len(begin)
    from_task = [name for name, value in row.items() if name in own_task and _same(own_task[name], value)]
    left = dict(row) | dict.fromkeys(from_task)
    if input_count is None or "response" in from_task:
        remnant = Remnant(left, from_task)
    else:
        left["response"] = row["response"] | {"output": None}
        remnant = Remnant(left, from_task, input_count, calls.places, calls.log_probs)
    return rollout, remnant


def restored_row(rollout: Rollout, remnant: Remnant) -> Row:
    """The row that `foreign_rollout` read."""
    taken = set(remnant.from_task)
    row = {name: rollout.task[name] if name in taken else value for name, value in remnant.row.items()}
    if remnant.given is None:
        return row
    output = rollout.items[remnant.given :]
    for turn, place, prompt in zip(rollout.turns, remnant.turn_items, rebuild_prompts(rollout.turns), strict=True):
        output[place] = with_tokens(output[place], turn, prompt)
        if (exact := remnant.log_probs.get(str(turn.turn))) is not None:
            output[place]["generation_log_probs"] = exact
    return row | {"response": row["response"] | {"output": output}}


class _Calls:
    """The model calls in a response's output: turns, and the items without the fields that these hold."""

    def __init__(self, output: list[Item], policy_version: int, incomplete: bool) -> None:
        self.items: list[Item] = list(output)
        self._chain = TurnChain()
        self.places: list[int] = []
        self.log_probs: dict[str, list[float]] = {}
        self.malformed = ""
        for place, item in enumerate(output):
            if not carries_tokens(item):
                continue
            prompt, generated, log_probs = (item[name] for name in TOKEN_FIELDS)
            try:
                nearest = array("f", log_probs).tolist()
                turn = self._chain.add(
                    prompt,
                    generated,
                    nearest,
                    policy_version=policy_version,
                    finish_reason="tool_calls" if item.get("type") == "function_call" else "stop",
                )
            except (TypeError, OverflowError, DataError) as error:
                self.malformed = f"output item {place}: {error}"
                continue
            if nearest != log_probs:
                self.log_probs[str(turn.turn)] = log_probs
            self.items[place] = {name: value for name, value in item.items() if name not in TOKEN_FIELDS}
            self.places.append(place)
        if incomplete and self.turns:
            self.turns[-1].finish_reason = "length"

    @property
    def turns(self) -> list[Turn]:
        return self._chain.turns


def _judge(rollout: Rollout, row: Row, known: Row, malformed: str, incomplete: bool) -> None:
    """Status, reward and reasons of a foreign row."""
    reward = row.get("reward")
    failure = row.get(FAILURE)
    if failure is not None or not isinstance(reward, int | float):
        terminal = bool(row.get(TERMINAL)) or failure is None
        rollout.failure_kind = FailureKind.DATA if terminal else FailureKind.INFRA
        rollout.failure_code = NO_REWARD if failure is None else str(failure)
        rollout.failure_detail = detail_of(row) or f"reward is {reward!r}"
        return
    if (mask := row.get("mask_sample")) not in (None, True, False):
        rollout.failure_kind, rollout.failure_code = FailureKind.DATA, "verifier_failed"
        rollout.failure_detail = f"mask_sample is {mask!r}, not true or false"
        return
    rollout.reward = float(reward)
    rollout.reward_components = _floats(row.get("reward_components"))
    top = {name: value for name, value in row.items() if name not in known and not name.startswith("_")}
    top = {name: value for name, value in top.items() if name not in ("reward", "mask_sample")}
    rollout.metrics = _floats(top) | _floats(row.get("metrics"))
    rollout.finish_reason = "length" if incomplete else "stop"
    rollout.status = Status.TRUNCATED if incomplete else Status.COMPLETED
    if mask:
        rollout.status = Status.MASKED
    if malformed:
        rollout.status, rollout.failure_code = Status.MASKED, "malformed_token_fields"
        rollout.failure_detail = malformed


def _incomplete(response: Any) -> bool:
    return isinstance(response, dict) and response.get("status") == "incomplete"


def _floats(fields: Any) -> dict[str, float]:
    if not isinstance(fields, dict):
        return {}
    return {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}


def _same(one: Any, other: Any) -> bool:
    """Equal, types included: 1, 1.0 and true are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
