"""Objects of an ATIF document (versions 1.0 to 1.8), and its steps as items of a conversation.

Invariant: `items_of` is a function of the steps alone, so the writer knows the items that a reader makes of its document.

    step                                     items
    source system or user                    message
    source agent                             reasoning · message · function_call …   (if the step has them)
      observation of one of its calls        function_call_output
      observation without a call             message of the user, as which the model reads it
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from roundhouse.errors import DataError
from roundhouse.rollout.responses import Item, assistant_items, function_call_output
from roundhouse.trajectories.foreign_files import ForeignModel

OWN = "roundhouse"
"""Key of `extra` in documents that Roundhouse wrote: the part of a rollout that ATIF cannot hold."""
OWN_VERSION = 1
RAW_ARGUMENTS = "arguments"
"""Key of a tool call's `extra`: its arguments as the policy wrote them, if their JSON differs."""


class Source(ForeignModel):
    media_type: str
    path: str


class Part(ForeignModel):
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: Source | None = None


Content = str | list[Part]


class ToolCall(ForeignModel):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class Result(ForeignModel):
    source_call_id: str | None = None
    content: Content | None = None


class Observation(ForeignModel):
    results: list[Result]


class Metrics(ForeignModel):
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class Step(ForeignModel):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: Content
    timestamp: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class Agent(ForeignModel):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class FinalMetrics(ForeignModel):
    extra: dict[str, Any] | None = None


class Trajectory(ForeignModel):
    schema_version: str
    agent: Agent
    steps: list[Step]
    session_id: str | None = None
    trajectory_id: str | None = None
    continued_trajectory_ref: str | None = None
    final_metrics: FinalMetrics | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[dict[str, Any]] | None = None


def items_of(steps: Iterable[Step]) -> list[list[Item]]:
    """Return the items of each step.

    Raises:
        DataError: an agent's message has a part that is not text.
    """
    return [_step_items(index, step) for index, step in enumerate(steps)]


def _step_items(index: int, step: Step) -> list[Item]:
    items: list[Item] = []
    if step.source == "agent":
        if step.reasoning_content is not None:
            summary = [{"type": "summary_text", "text": step.reasoning_content}]
            items.append({"type": "reasoning", "id": f"rs_{index}", "summary": summary})
        message = {"content": _agent_text(step), "tool_calls": [_chat_call(call) for call in step.tool_calls or []]}
        if message["content"] or message["tool_calls"] or not items:
            items += assistant_items(message, f"msg_{index}", reasoning=not items)
    elif step.message or step.observation is None:
        items.append({"type": "message", "role": step.source, "content": _content(step.message)})
    calls = {call.tool_call_id for call in step.tool_calls or []}
    for result in step.observation.results if step.observation else []:
        content = _content(result.content or "")
        if result.source_call_id in calls:
            items.append(function_call_output(str(result.source_call_id), content))
        else:
            role = "system" if step.source == "system" else "user"
            items.append({"type": "message", "role": role, "content": content})
    return items


def _agent_text(step: Step) -> str:
    if isinstance(step.message, str):
        return step.message
    if other := next((part.type for part in step.message if part.text is None), None):
        raise DataError(
            f"step {step.step_id}: the message of an agent has a part of type {other}; only text can be read."
        )
    return "".join(part.text or "" for part in step.message)


def _content(content: Content) -> Any:
    """Return a text as it is, and parts in the form of Responses."""
    if isinstance(content, str):
        return content
    return [_part(part) for part in content]


def _part(part: Part) -> Item:
    if part.source is None:
        return {"type": "input_text", "text": part.text or ""}
    return {"type": f"input_{part.type}", f"{part.type}_url": part.source.path}


def _chat_call(call: ToolCall) -> dict[str, Any]:
    raw = (call.extra or {}).get(RAW_ARGUMENTS)
    arguments = raw if isinstance(raw, str) else arguments_text(call.arguments)
    return {"id": call.tool_call_id, "function": {"name": call.function_name, "arguments": arguments}}


def arguments_text(arguments: dict[str, Any]) -> str:
    """Return the arguments of a tool call as the text of a call."""
    return json.dumps(arguments, ensure_ascii=False)
