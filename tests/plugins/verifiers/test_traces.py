"""Saved traces of verifiers: branches, outcomes, and lines that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundhouse.errors import DataError
from roundhouse.plugins.verifiers.reader import read
from roundhouse.stages.importing import find_format
from roundhouse.trajectories.records import Status


def node(role: str, parent: int | None, tokens: list[int], sampled: int = 0, **message: Any) -> dict[str, Any]:
    """Return a node; `sampled` of its tokens, the last ones, were drawn."""
    own = {"message": {"role": role, **message}, "token_ids": tokens}
    own |= {} if parent is None else {"parent": parent}
    mask = [False] * (len(tokens) - sampled) + [True] * sampled
    return own | {"sampled": sampled > 0, "mask": mask, "logprobs": [-0.5] * sampled}


def trace(**keys: Any) -> dict[str, Any]:
    nodes = [
        node("user", None, [1, 2], content="2*3?"),
        node("assistant", 0, [7, 3], 1, tool_calls=[{"id": "c", "name": "f", "arguments": "{}"}]),
        node("tool", 1, [4], tool_call_id="c", content="6"),
        node("assistant", 2, [7, 5, 6], 2, content="6"),
    ]
    task = {"type": "T", "data": {"idx": 0, "answer": "6"}, "key": "k"}
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "form": {"score": 2.0}}
    own = {"id": "t", "task": task, "agent": {}, "nodes": nodes, "rewards": rewards, "metrics": {"m": 3.0}, "ok": True}
    return own | keys


def episode(*traces: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "id": "e",
        "env": {"id": "toy"},
        "task": {"type": "T", "data": {}},
        "ok": True,
        "traces": list(traces),
    } | keys


def written(directory: Path, *lines: Any) -> Path:
    file = directory / "traces.jsonl"
    file.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return file


def test_sampled_messages_are_turns_and_the_weighted_rewards_add_up(tmp_path: Path) -> None:
    file = written(tmp_path, episode(trace()))
    assert find_format(tmp_path) == ("verifiers", [file])
    [rollout] = read([file], None, 2).rollouts
    first, second = rollout.turns
    assert (first.prompt_token_ids, first.generation_token_ids, first.finish_reason) == ([1, 2, 7], [3], "tool_calls")
    assert (second.parent, second.prompt_token_ids, second.generation_token_ids) == (0, [4, 7], [5, 6])
    assert (rollout.reward, rollout.reward_components) == (2.5, {"right": 0.5, "form": 2.0})
    assert (rollout.group_id, rollout.task["answer"], rollout.metrics) == ("k", "6", {"m": 3.0})
    kinds = [item["type"] for item in rollout.items]
    assert kinds == ["message", "function_call", "function_call_output", "message"]


def test_failures_have_no_reward_and_other_agents_are_masked(tmp_path: Path) -> None:
    failed = trace(id="f", ok=False, errors=[{"type": "TaskError", "message": "gone"}])
    judge = trace(id="j", agent={"name": "judge", "trainable": False})
    cut = trace(id="c", stop_condition="max_turns")
    file = written(tmp_path, episode(failed), episode(trace(), judge, id="2"), episode(cut, id="3"))
    one, two, three, four = read([file], None, 0).rollouts
    assert (one.status, one.reward, one.failure_code, one.failure_detail) == (Status.FAILED, None, "TaskError", "gone")
    assert [each.group_id for each in (two, three)] == ["k/agent", "k/judge"]
    assert (three.status, three.failure_code) == (Status.MASKED, "not_trainable")
    assert (four.status, four.finish_reason) == (Status.TRUNCATED, "max_turns")


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return an episode whose trace has a value at a path."""
    own = trace(id="u")
    *parents, leaf = path.split(".")
    part: Any = own
    for name in parents:
        part = part[int(name)] if name.isdecimal() else part[name]
    part[leaf] = value
    return episode(own, id="2")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not JSON"),
        (episode(trace(id="u")), "line 2: the episode 'e' is that of .*line 1"),
        (episode(trace(), id="2"), "line 2: traces.0: the trace 't' is that of"),
        (episode(trace(id="u"), id=2), "line 2: id: .* and is 2"),
        (changed("rewards.right.score", None), "line 2: traces.0.rewards.right.score: .* None"),
        (changed("nodes.1.token_ids", [1.5]), "traces.0.nodes.1.token_ids.0: .* 1.5"),
        (changed("nodes.1.mask", [True]), "nodes.1: token_ids has 2 values and mask 1"),
        (changed("nodes.3.mask", [True, False, True]), "nodes.3.mask: the sampled tokens are not the last ones"),
        (changed("nodes.3.logprobs", [-1.0]), "nodes.3: .*2 generated tokens and 1 log-prob"),
        (changed("nodes.3.parent", 3), "nodes.3.parent is 3, not the number of a node before it"),
        (changed("nodes.2.message.tool_call_id", None), "nodes.2.message.tool_call_id is missing"),
        (changed("nodes.0.message.content", [{"type": "audio"}]), "nodes.0.message.content: a part has type 'audio'"),
    ],
)
def test_a_bad_line_is_refused_with_its_key(line: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        read([written(tmp_path, episode(trace()), line)], None, 0)
