"""Convert a rollout record to a row of NeMo Gym's rollouts JSONL or failures sidecar; pure functions.

Invariant: `incoming.rollout_of(row)` of a row made here equals the record. NeMo Gym's fields hold all that fits them
(token fields on the last item of each model call, with whole prompts); `_roundhouse` holds the rest. The task's fields
stay at the top of the row, as in a verifier's answer; `_roundhouse` also has fields that a result field hides.

    task {"q": 1, "reward": "a field of the task"} + result {"reward": 0.5}
        ->  {"q": 1, "reward": 0.5, …, "_roundhouse": {"added": […], "replaced": {"reward": "a field of the task"}, …}}

Assign the items of a rollout to its model calls; pure functions.

Invariant: a call's token fields are on the last item of its output and cover all of it. Items carry no call number, so
the calls are separated by the form of an engine's reply (reasoning, then text, then tool calls) and by the items
between two replies (a tool's output, a user's message). If this finds fewer replies than calls, it assigns nothing to
the remaining calls.

    message · function_call · function_call_output · message,  2 calls  ->  items 1 and 3

A rollout row in the form that NeMo RL trains on: read and generated tokens in turn. Pure.

Invariant: the messages' tokens joined are the last prompt and its generation. A prompt that does not begin with all
tokens so far is refused, because its log-probabilities belong to another history.

    prompt [1 2] generated [3] · prompt [1 2 3 4] generated [5]
        ->  user [1 2], assistant [3], user [4], assistant [5]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from roundhouse.errors import DataError
from roundhouse.generation.protocol import TOKEN_FIELDS
from roundhouse.plugins.nemo_gym.exchange.json_lines import ROLLOUT, TASK, Row
from roundhouse.rollout.protocol import DETAIL, FAILURE, TERMINAL
from roundhouse.rollout.responses import response_object, whole_response
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn
from roundhouse.trajectories.schemas import rebuild_prompts

OWN = "_roundhouse"
VERSION = 1
ATTEMPT = "_ng_attempt_index"

_ELSEWHERE = {"task", "status", "failure_kind", "reward", "reward_components", "metrics", "items", "turns"}
_ON_ITEMS = {"turn", "prompt_token_ids", "generation_token_ids", "generation_log_probs"}
SCALARS = tuple(field.name for field in fields(Rollout) if field.name not in _ELSEWHERE)
"""Fields of a record that `_roundhouse` holds unchanged: all that are not stored elsewhere."""
TURN_SCALARS = tuple(field.name for field in fields(Turn) if field.name not in _ON_ITEMS)
"""The same of a turn."""


@dataclass(frozen=True, slots=True)
class Address:
    """Position of a rollout in a collection."""

    task_index: int
    rollout_index: int
    agent: str
    """Instance name for the rows of tasks without an agent."""
    after: int = 0
    """Number of rewarded rollouts before this unrewarded rollout: two files do not keep their common
    order."""


def addresses(rollouts: Sequence[Rollout], agent: str | None = None) -> list[Address]:
    """The addresses of a dataset's rollouts: tasks keep their numbers, or get them as their groups come; samples keep theirs.

    Args:
        agent: instance name; by default each rollout's environment.
    """
    numbers = _own_numbers(rollouts)
    places, judged = [], 0
    for rollout in rollouts:
        task_index = numbers.setdefault(rollout.group_id, len(numbers))
        after = judged if rollout.reward is None else 0
        places.append(Address(task_index, rollout.sample, agent or rollout.environment, after))
        judged += rollout.reward is not None
    return places


def is_index(value: Any) -> TypeGuard[int]:
    """Return whether a field can be the number of a task, rollout or attempt."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 - 1


def result_row(rollout: Rollout, address: Address, reply: Row | None = None) -> Row:
    """Return the row of a rollout: for the rollouts file if it has a reward, otherwise for the failures sidecar.

    Args:
        reply: the verifier's answer; its further fields stay at the top of the row.
    """
    input_count = len(input_items(rollout.task))
    derived = rollout.items[:input_count] == input_items(rollout.task)
    output = rollout.items[input_count:] if derived else rollout.items
    # The item of each turn that takes its token fields; None if none does, or it has such fields already
    places = last_items(output, len(rollout.turns))
    placed = [
        None if place is None or any(name in output[place] for name in TOKEN_FIELDS) else place for place in places
    ]
    prompts = rebuild_prompts(rollout.turns)
    response_items = list(output)
    turns = []
    for place, turn, prompt in zip(placed, rollout.turns, prompts, strict=True):
        own_turn: Row = {"item": place, **{name: getattr(turn, name) for name in TURN_SCALARS}}
        if place is None:
            own_turn = with_tokens(own_turn, turn, prompt)
        else:
            response_items[place] = with_tokens(response_items[place], turn, prompt)
        turns.append(own_turn)
    params = rollout.task.get("responses_create_params")
    response = response_object(
        f"resp_{rollout.seed:08x}",
        response_items,
        model="policy",
        created_at=rollout.started_at,
        finish_reason="length" if rollout.status is Status.TRUNCATED else "stop",
        input_tokens=sum(turn.prompt_length for turn in rollout.turns),
        output_tokens=rollout.generated_tokens,
        params=params if isinstance(params, dict) else {},
    )
    # An import reads the items of the record back
    result: Row = {"response": whole_response(response, items=False)}
    result |= _judgement(rollout) | _stamps(rollout, address)
    if reply is not None and rollout.reward is not None:
        result = {**_further_fields(reply, rollout.task), **result}
    own = {
        "version": VERSION,
        "after": address.after,
        "status": rollout.status.value,
        "failure_kind": rollout.failure_kind.value if rollout.failure_kind else None,
        "input_in_task": derived,
        **{name: getattr(rollout, name) for name in SCALARS},
        "turns": turns,
    }
    return _over_task(rollout.task, result, own)


def materialized_row(rollout: Rollout, address: Address) -> Row:
    """The row of a rollout in the materialized inputs."""
    return _over_task(rollout.task, _stamps(rollout, address), {"version": VERSION})


def task_under(row: Row) -> Row:
    """The task that `result_row` or `materialized_row` wrote over."""
    added, replaced = set(row[OWN]["added"]), row[OWN]["replaced"]
    return {name: replaced.get(name, value) for name, value in row.items() if name not in added}


def with_tokens(item: Item, turn: Turn, prompt: list[int]) -> Item:
    """An item with the token fields of the call that it ends."""
    return item | dict(zip(TOKEN_FIELDS, (prompt, turn.generation_token_ids, turn.generation_log_probs), strict=True))


_VERDICT = frozenset({"responses_create_params", "response", "reward", "reward_components", "metrics", "mask_sample"})


def _further_fields(reply: Row, task: Row) -> Row:
    """Return the fields that a verifier added to the task, without its verdict and the conversation."""
    return {
        name: value
        for name, value in reply.items()
        if name not in task and name not in _VERDICT and not name.startswith("_")
    }


def _own_numbers(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Task indexes by group, if the tasks carry one each; otherwise none."""
    numbers: dict[str, int] = {}
    for rollout in rollouts:
        index = rollout.task.get(TASK)
        if not is_index(index) or numbers.setdefault(rollout.group_id, index) != index:
            return {}
    return numbers if len(set(numbers.values())) == len(numbers) else {}


def _over_task(task: Row, result: Row, own: Row) -> Row:
    names = [*result, OWN]
    own["added"] = [name for name in names if name not in task]
    own["replaced"] = {name: task[name] for name in names if name in task}
    return {**task, **result, OWN: own}


def _stamps(rollout: Rollout, address: Address) -> Row:
    stamps: Row = {TASK: address.task_index, ROLLOUT: address.rollout_index}
    if not isinstance(rollout.task.get("agent_ref"), dict):
        stamps["agent_ref"] = {"type": "responses_api_agents", "name": address.agent}
    return stamps


def _judgement(rollout: Rollout) -> Row:
    fields: Row = {}
    if rollout.reward is not None:
        fields["reward"] = rollout.reward
    if rollout.reward_components:
        fields["reward_components"] = rollout.reward_components
    if rollout.metrics:
        fields["metrics"] = rollout.metrics
    if rollout.status is Status.MASKED:
        fields["mask_sample"] = True
    if rollout.reward is None:
        fields |= {
            FAILURE: rollout.failure_code or rollout.status.value,
            TERMINAL: rollout.failure_kind is FailureKind.DATA,
            DETAIL: rollout.failure_detail,
        }
    if rollout.attempt > 1:
        fields[ATTEMPT] = rollout.attempt - 1
    return fields


Item = dict[str, Any]

_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}


def input_items(task: dict[str, Any]) -> list[Item]:
    """Return the first conversation of a task row as items; empty for a row without one."""
    params = task.get("responses_create_params")
    conversation = params.get("input") if isinstance(params, dict) else None
    if isinstance(conversation, str):
        return [{"type": "message", "role": "user", "content": conversation}]
    if isinstance(conversation, list) and all(isinstance(item, dict) for item in conversation):
        return [{"type": "message", **item} for item in conversation]
    return []


def last_items(output: Sequence[Item], calls: int) -> list[int | None]:
    """For each model call, the place in `output` of its last item; None for a call without one."""
    for replies in (_ends(output, within=True), _ends(output, within=False)):
        if len(replies) == calls:
            return list(replies)
    ends = _ends(output, within=True)[:calls]
    return [*ends, *[None] * (calls - len(ends))]


def carries_tokens(item: Item) -> bool:
    """Return whether all three token fields are present and can belong to a call."""
    prompt, generated, log_probs = (item.get(name) for name in TOKEN_FIELDS)
    return isinstance(prompt, list) and isinstance(generated, list) and isinstance(log_probs, list) and bool(generated)


def _ends(output: Sequence[Item], *, within: bool) -> list[int]:
    """Return the ends of replies: before an item of another origin and, `within` a run, before the first item of a
    new reply."""
    ends: list[int] = []
    before: int | None = None
    for place, item in enumerate(output):
        kind = item.get("type", "message")
        rank = None if kind == "message" and item.get("role") != "assistant" else _ORDER.get(kind)
        if before is not None and (rank is None or (within and rank <= before and rank < _ORDER["function_call"])):
            ends.append(place - 1)
        before = rank
    return [*ends, len(output) - 1] if before is not None else ends


_CALL_TAGS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
_THINK_TAGS = ("<think>", "</think>")


def message_log(row: Row) -> list[dict[str, Any]]:
    """The messages of a rollout: role, `token_ids` and, of the assistant's, `generation_logprobs` and two flags.

    `is_invalid_tool_call`: the text holds a tag of a tool call. `has_malformed_thinking`: it holds one of thinking, or a
    reasoning item holds one more than once.

    Raises:
        DataError: no item has tokens, or a prompt does not continue the tokens before it.
    """
    messages: list[dict[str, Any]] = []
    seen: list[int] = []
    for place, item in enumerate(row["response"]["output"]):
        if not carries_tokens(item):
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        kind = item.get("type", "message")
        content = item.get("content") if kind == "message" else None
        text = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())
        summary = item.get("summary") if kind == "reasoning" else None
        thought = "".join(part.get("text") or "" for part in summary or ())
        if prompt[: len(seen)] != seen:
            raise DataError(f"Output item {place}: its prompt does not begin with the {len(seen)} tokens before it.")
        messages.append({"role": "user", "content": "", "token_ids": prompt[len(seen) :]})
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "token_ids": generated,
                "generation_logprobs": item["generation_log_probs"],
                "is_invalid_tool_call": any(tag in text for tag in _CALL_TAGS),
                "has_malformed_thinking": any(tag in text or thought.count(tag) > 1 for tag in _THINK_TAGS),
            }
        )
        seen = prompt + generated
    if not messages:
        raise DataError("No item of the rollout's output has generated tokens: there is nothing to train on.")
    return messages
