"""Read verifiers' saved traces: `traces.jsonl`, one episode a line, of its version 1.

Invariants: a trace is one rollout; a message that a model sampled is one turn if it has token IDs. The nodes of a trace form a
tree; the prompt of a turn is the tokens of all nodes before it and the scaffold of its own, so that all branches are kept as
turns. The conversation is that of the last branch. A trace that verifiers marks as not trainable, such as a judge's, is masked.

    nodes   0 system  1 user  2 assistant (sampled)  3 tool  4 assistant (sampled)         parent of each: the one before
    turns           prompt 0+1+scaffold, generates 2         adds 3+scaffold, generates 4

The file has log-probabilities with four decimals, as verifiers writes them. Rollouts of one task and agent are a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from roundhouse.errors import DataError
from roundhouse.images import image_names
from roundhouse.rollout.conversation import TurnChain
from roundhouse.rollout.responses import Item, assistant_items, function_call_output
from roundhouse.trajectories.foreign_files import (
    NO_REWARD,
    ForeignModel,
    ForeignRollouts,
    Head,
    Identities,
    Reader,
    Row,
    checked,
    documents,
    foreign_table,
)
from roundhouse.trajectories.records import FailureKind, Rollout, Status

LIMITS = frozenset({"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"})
"""Stop conditions of a truncated trace."""


class _ToolCall(ForeignModel):
    id: str
    name: str
    arguments: str


class _Message(ForeignModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Tool(ForeignModel):
    name: str
    type: str = "function"
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Node(ForeignModel):
    message: _Message
    parent: int | None = None
    sampled: bool = False
    tools: list[_Tool] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
    mask: list[bool] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)


class _Span(ForeignModel):
    start: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.start) if self.end else 0.0


class _ModelCall(ForeignModel):
    node: int | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    time: _Span = _Span()
    error: dict[str, Any] | None = None


class _Reward(ForeignModel):
    score: float
    weight: float = 1.0


class _Error(ForeignModel):
    type: str
    message: str = ""


class _Agent(ForeignModel):
    name: str = "agent"
    trainable: bool = True


class _Task(ForeignModel):
    data: dict[str, Any]
    key: str | None = None
    hash: str | None = None


class _Timing(ForeignModel):
    start: float = 0.0
    agent: _Span = _Span()
    scoring: _Span = _Span()


class _Trace(ForeignModel):
    id: str
    task: _Task
    agent: _Agent
    nodes: list[_Node] = Field(default_factory=list)
    calls: list[_ModelCall] = Field(default_factory=list)
    tools: list[_Tool] = Field(default_factory=list)
    rewards: dict[str, _Reward | None] = Field(default_factory=dict)
    metrics: dict[str, float | None] = Field(default_factory=dict)
    ok: bool = False
    stop_condition: str | None = None
    errors: list[_Error] = Field(default_factory=list)
    timing: _Timing = _Timing()


class _Environment(ForeignModel):
    id: str = ""
    name: str | None = None


class _Group(ForeignModel):
    id: str


class _Episode(ForeignModel):
    id: str
    env: _Environment = _Environment()
    group: _Group | None = None
    traces: list[_Trace]


HELD = frozenset(("nodes", "calls", "tools", "rewards", "metrics", "task", "timing"))
"""Keys of a trace that become parts of a rollout."""


def read(files: Sequence[Path], options: None, policy_version: int) -> ForeignRollouts:
    """Read saved traces (`reader.verifiers`).

    Raises:
        DataError: a line is not an episode, or has the ID of another one.
    """
    identities = Identities()
    rollouts: list[Rollout] = []
    foreign: list[tuple[str, str, Row]] = []
    empty = 0
    for file in files:
        for place, document in documents(file):
            episode = checked(_Episode, document, place)
            identities.register("the episode", episode.id, place)
            empty += not episode.traces
            for index, trace in enumerate(episode.traces):
                where = f"{place}: traces.{index}"
                identities.register("the trace", trace.id, where)
                rollout = _rollout(episode, trace, identities, policy_version, where)
                rollouts.append(rollout)
                rest = {name: value for name, value in document["traces"][index].items() if name not in HELD}
                foreign.append((rollout.rollout_id, where, {"episode": episode.id, **rest}))
    note = f"{empty} episodes have no trace and make no rollout." if empty else ""
    return ForeignRollouts(rollouts, foreign_table(foreign), note)


def _rollout(episode: _Episode, trace: _Trace, identities: Identities, policy_version: int, place: str) -> Rollout:
    for index, node in enumerate(trace.nodes):
        if node.parent is not None and not 0 <= node.parent < index:
            raise DataError(f"{place}.nodes.{index}.parent is {node.parent}, not the number of a node before it.")
    path = _path_to(trace.nodes, len(trace.nodes) - 1)
    first = next((place for place, index in enumerate(path) if trace.nodes[index].sampled), len(path))
    items = [_items(trace.nodes[index].message, f"{place}.nodes.{index}.message", index) for index in path]
    data = trace.task.data
    task_id = str(data.get("id") or trace.task.key or trace.task.hash or data.get("idx", ""))
    params: dict[str, Any] = {"input": [item for own in items[:first] for item in own]}
    tools = (trace.nodes[path[0]].tools if path else []) or trace.tools
    if tools:
        params["tools"] = [tool.model_dump() for tool in tools]
    group = episode.group.id if episode.group is not None else task_id
    if len(episode.traces) > 1:
        group = f"{group}/{trace.agent.name}"
    calls = {call.node: call for call in trace.calls if call.node is not None}
    rollout = Rollout(
        group_id=group,
        sample=identities.next_sample(group),
        task={**data, "task_id": task_id, "responses_create_params": params},
        environment=episode.env.name or episode.env.id or "verifiers",
        status=Status.COMPLETED,
        items=[item for own in items for item in own],
        turns=_turns(trace, calls, policy_version, place).turns,
        finish_reason="stop",
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        started_at=trace.timing.start,
        seconds=trace.timing.agent.seconds,
        generation_seconds=sum(call.time.seconds for call in trace.calls),
        environment_seconds=trace.timing.scoring.seconds,
    )
    _judge(rollout, trace)
    return rollout


def _judge(rollout: Rollout, trace: _Trace) -> None:
    """Set the outcome of a trace. A failed one keeps no reward, whatever number the file has."""
    rewards = {name: reward.score * reward.weight for name, reward in trace.rewards.items() if reward is not None}
    if not trace.ok or not rewards:
        rollout.status, rollout.failure_kind, rollout.finish_reason = Status.FAILED, FailureKind.DATA, ""
        if trace.errors:
            rollout.failure_code, rollout.failure_detail = trace.errors[-1].type, trace.errors[-1].message
        elif not trace.ok:
            rollout.failure_code, rollout.failure_detail = "not_ok", str(trace.stop_condition)
        else:
            rollout.failure_code, rollout.failure_detail = NO_REWARD, "the trace has no reward"
        return
    rollout.reward = math.fsum(rewards.values())
    rollout.reward_components = rewards if len(rewards) > 1 else {}
    last = next((call for call in reversed(trace.calls) if call.error is None), None)
    if trace.stop_condition in LIMITS or (last is not None and last.finish_reason == "length"):
        limit = {"max_turns": "max_turns", "compaction_failed": "environment"}
        rollout.status = Status.TRUNCATED
        rollout.finish_reason = limit.get(trace.stop_condition or "", "length")
    if not trace.agent.trainable:
        rollout.status, rollout.failure_code = Status.MASKED, "not_trainable"


def _path_to(nodes: Sequence[_Node], last: int) -> list[int]:
    """Return the numbers of the nodes from a root to this one."""
    path: list[int] = []
    index: int | None = last if nodes else None
    while index is not None:
        path.append(index)
        index = nodes[index].parent
    return path[::-1]


def _turns(trace: _Trace, calls: dict[int, _ModelCall], policy_version: int, place: str) -> TurnChain:
    """Return a turn for each sampled node with tokens."""
    chain = TurnChain()
    for index, node in enumerate(trace.nodes):
        where = f"{place}.nodes.{index}"
        if len(node.mask) != len(node.token_ids):
            raise DataError(f"{where}: token_ids has {len(node.token_ids)} values and mask {len(node.mask)}.")
        generated = sum(node.mask)
        if not node.sampled or not generated:
            continue
        scaffold = len(node.token_ids) - generated
        if any(node.mask[:scaffold]):
            raise DataError(f"{where}.mask: the sampled tokens are not the last ones.")
        path = [trace.nodes[each] for each in _path_to(trace.nodes, index)[:-1]]
        before = [token for each in path for token in each.token_ids]
        call = calls.get(index, _ModelCall())
        try:
            chain.add(
                before + node.token_ids[:scaffold],
                node.token_ids[scaffold:],
                node.logprobs,
                policy_version=policy_version,
                finish_reason=call.finish_reason or ("tool_calls" if node.message.tool_calls else "stop"),
                latency_seconds=call.time.seconds,
                images=image_names({"content": each.message.content} for each in path),
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    return chain


def _items(message: _Message, place: str, index: int) -> list[Item]:
    if message.role == "assistant":
        if isinstance(message.content, list):
            raise DataError(f"{place}.content is a list; the message of an assistant is a text.")
        items: list[Item] = []
        if message.reasoning_content is not None:
            summary = [{"type": "summary_text", "text": message.reasoning_content}]
            items.append({"type": "reasoning", "id": f"rs_{index}", "summary": summary})
        calls = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls or []
        ]
        if message.content or calls or not items:
            items += assistant_items(
                {"content": message.content, "tool_calls": calls}, f"msg_{index}", reasoning=not items
            )
        return items
    content = message.content or ""
    if isinstance(content, list):
        content = [_part(part, f"{place}.content") for part in content]
    if message.role == "tool":
        if message.tool_call_id is None:
            raise DataError(f"{place}.tool_call_id is missing.")
        return [function_call_output(message.tool_call_id, content)]  # type: ignore[arg-type]
    return [{"type": "message", "role": message.role, "content": content}]


def _part(part: dict[str, Any], place: str) -> dict[str, Any]:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "input_text", "text": part["text"]}
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict) and isinstance(image.get("url"), str):
        return {"type": "input_image", "image_url": image["url"]}
    raise DataError(f"{place}: a part has type {part.get('type')!r:.80}; texts and images can be read.")


def _is_episode(head: Head) -> bool:
    return {"env", "task", "traces", "ok"} <= head.row.keys()


READER = Reader(_is_episode, "traces.jsonl")
