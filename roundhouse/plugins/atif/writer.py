"""Write rollouts as ATIF 1.7, one trajectory a file.

Invariant: Harbor's validator accepts every document, and the reader makes the same rollout of it. The format's own fields hold
all that fits them, with whole prompts at each model call; `extra.roundhouse` holds the rest: the task row, seeds, times, and
the data of items and turns that no step has. A rollout without an item has one empty step, since the format demands one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from roundhouse import __version__
from roundhouse.plugins.atif.document import (
    OWN,
    OWN_VERSION,
    RAW_ARGUMENTS,
    Step,
    arguments_text,
    items_of,
)
from roundhouse.plugins.atif.reader import SCALARS, TOKENS, TURN_SCALARS
from roundhouse.rollout.responses import Item, chat_tools
from roundhouse.store.stage import Reference, read_table
from roundhouse.trajectories.foreign_files import Written
from roundhouse.trajectories.records import Rollout, item_text
from roundhouse.trajectories.schemas import rebuild_prompts, rollouts_from_tables

SCHEMA = "ATIF-v1.7"
_RANK = {"reasoning": 0, "message": 1, "function_call": 2}


def write(reference: Reference, directory: Path, agent: str | None) -> Written:
    """Write the rollouts of a complete stage to `<directory>/<number>/trajectory.json` (`writer.atif`)."""
    rollouts = rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))
    for number, rollout in enumerate(rollouts):
        place = directory / f"{number:06d}"
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(trajectory(rollout, agent), ensure_ascii=False, allow_nan=False)
        (place / "trajectory.json").write_text(text + "\n", encoding="utf-8")
    failures = sum(rollout.reward is None for rollout in rollouts)
    return Written(directory, len(rollouts) - failures, failures)


def trajectory(rollout: Rollout, agent: str | None = None) -> dict[str, Any]:
    """Return a rollout as an ATIF document."""
    steps, places = _steps(rollout.items)
    replies = [place for place in dict.fromkeys(places[_input_count(rollout) :]) if steps[place]["source"] == "agent"]
    turns: list[dict[str, Any]] = []
    matched = len(replies) == len(rollout.turns)
    for index, (turn, prompt) in enumerate(zip(rollout.turns, rebuild_prompts(rollout.turns), strict=True)):
        record = {"step": replies[index] if matched else None} | {name: getattr(turn, name) for name in TURN_SCALARS}
        if matched:
            steps[replies[index]] |= {"llm_call_count": 1, "metrics": _metrics(prompt, turn)}
        else:
            record |= dict(zip(TOKENS, (prompt, turn.generation_token_ids, turn.generation_log_probs), strict=True))
        turns.append(record)
    steps = steps or [{"source": "system", "message": ""}]
    steps = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    params = rollout.task.get("responses_create_params")
    tools = _tool_definitions(params.get("tools") if isinstance(params, dict) else None)
    verdict = {"reward": rollout.reward, "reward_components": rollout.reward_components, "metrics": rollout.metrics}
    return {
        "schema_version": SCHEMA,
        "session_id": rollout.rollout_id,
        "trajectory_id": rollout.rollout_id,
        "agent": {"name": agent or rollout.environment, "version": f"roundhouse {__version__}"}
        | ({"tool_definitions": tools} if tools else {}),
        "steps": steps,
        "final_metrics": {
            "total_steps": len(steps),
            "total_prompt_tokens": sum(turn.prompt_length for turn in rollout.turns),
            "total_completion_tokens": sum(len(turn.generation_token_ids) for turn in rollout.turns),
            "extra": {name: value for name, value in verdict.items() if value not in (None, {})},
        },
        "extra": {
            OWN: {
                "version": OWN_VERSION,
                "status": rollout.status.value,
                "failure_kind": rollout.failure_kind.value if rollout.failure_kind else None,
                **{name: getattr(rollout, name) for name in SCALARS},
                "task": rollout.task,
                "items": _changes(rollout.items, steps),
                "turns": turns,
            }
        },
    }


def _tool_definitions(tools: Any) -> list[dict[str, Any]]:
    """Return the functions among a task's tools; the task row in `extra` has all."""
    named = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return chat_tools(
        tool for tool in named if tool.get("type", "function") == "function" and isinstance(tool.get("name"), str)
    )


def _metrics(prompt: list[int], turn: Any) -> dict[str, Any]:
    metrics = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.generation_token_ids),
        "prompt_token_ids": prompt,
        "completion_token_ids": turn.generation_token_ids,
    }
    return metrics | ({"logprobs": turn.generation_log_probs} if turn.generation_log_probs else {})


def _input_count(rollout: Rollout) -> int:
    params = rollout.task.get("responses_create_params")
    initial = params.get("input") if isinstance(params, dict) else None
    return len(initial) if isinstance(initial, list) else int(isinstance(initial, str))


def _steps(items: Sequence[Item]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the steps of a conversation, and for each item the index of its step."""
    steps: list[dict[str, Any]] = []
    places: list[int] = []
    rank = 3
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        own = _RANK.get(kind) if kind != "message" or role == "assistant" else None
        if own is not None:
            if rank == 3 or own < rank or own == rank < 2:
                steps.append({"source": "agent", "message": ""})
            _add_to_reply(steps[-1], kind, item)
        elif kind == "function_call_output":
            if not steps:
                steps.append({"source": "system", "message": ""})
            steps[-1].setdefault("observation", {"results": []})["results"].append(_result(item, steps[-1]))
        else:
            steps.append({"source": "user" if role == "user" else "system", "message": item_text(item)})
        rank = 3 if own is None else own
        places.append(len(steps) - 1)
    return steps, places


def _add_to_reply(step: dict[str, Any], kind: str, item: Item) -> None:
    if kind == "reasoning":
        step["reasoning_content"] = item_text(item)
    elif kind == "message":
        step["message"] = item_text(item)
    else:
        step.setdefault("tool_calls", []).append(_tool_call(item))


def _tool_call(item: Item) -> dict[str, Any]:
    """Return a call; arguments that are no object, or another text than their JSON here, are kept as written."""
    text = str(item.get("arguments", ""))
    try:
        arguments = orjson.loads(text)
    except ValueError:
        arguments = None
    known = isinstance(arguments, dict)
    call = {
        "tool_call_id": str(item.get("call_id", "")),
        "function_name": str(item.get("name", "")),
        "arguments": arguments if known else {},
    }
    return call if known and arguments_text(arguments) == text else call | {"extra": {RAW_ARGUMENTS: text}}


def _result(item: Item, step: dict[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    content = output if isinstance(output, str) else "".join(part.get("text", "") for part in output or ())
    call_id = item.get("call_id")
    ours = any(call["tool_call_id"] == call_id for call in step.get("tool_calls", []))
    return {"source_call_id": call_id, "content": content} if ours else {"content": content}


def _changes(items: list[Item], steps: list[dict[str, Any]]) -> Any:
    """Return the difference of items from the items that a reader makes of the steps: by index, or all items."""
    read = [item for own in items_of([Step.model_validate(step) for step in steps]) for item in own]
    if len(read) != len(items):
        return items
    changes: dict[str, Any] = {}
    for index, (item, other) in enumerate(zip(items, read, strict=True)):
        added = {name: value for name, value in item.items() if name not in other or other[name] != value}
        dropped = [name for name in other if name not in item]
        if added or dropped:
            changes[str(index)] = {"set": added, "drop": dropped}
    return changes
