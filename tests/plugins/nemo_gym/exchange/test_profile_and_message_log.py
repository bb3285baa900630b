"""The profile's figures were computed by NeMo Gym's own RewardProfiler once, on exactly these rows."""

from __future__ import annotations

from typing import Any

import pytest

from roundhouse.errors import DataError
from roundhouse.plugins.nemo_gym.exchange.json_lines import Row
from roundhouse.plugins.nemo_gym.exchange.outgoing import message_log
from roundhouse.plugins.nemo_gym.exchange.statistics import profile

INPUTS = [
    {
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        "agent_ref": {"name": "a"},
        "responses_create_params": {"input": "q"},
    }
    for task in range(2)
    for rollout in range(3)
]


def rollout(task: int, index: int, reward: float) -> Row:
    return {"_ng_task_index": task, "_ng_rollout_index": index, "reward": reward, "response": {"usage": {"tokens": 4}}}


ROLLOUTS = [rollout(0, 1, 0.0), rollout(0, 0, 1.0), rollout(0, 2, 1.0), rollout(1, 0, 0.0)]


def test_a_task_has_its_row_and_what_is_missing_of_it():
    first, second = profile(INPUTS, ROLLOUTS, allow_partial=True).tasks
    assert first["sample"] == {"agent_ref": {"name": "a"}, "responses_create_params": {"input": "q"}}
    assert first["mean/reward"] == pytest.approx(2 / 3)
    assert first["std/reward"] == pytest.approx(0.5773502691896257)  # sqrt((1/9 + 4/9 + 1/9) / 2)
    assert (second["num_rollouts"], second["expected_num_rollouts"], second["missing_num_rollouts"]) == (1, 3, 2)
    assert second["reward_profile_completion_pct"] == pytest.approx(100 / 3)
    assert [info["rollout_id"] for info in first["rollout_infos"]] == ["0:0", "0:1", "0:2"]


def test_an_agent_has_the_statistics_of_all_its_rollouts():
    [agent] = profile(INPUTS, ROLLOUTS, allow_partial=True).agents
    assert agent["agent_ref"] == {"name": "a"}
    assert (agent["mean/reward"], agent["mean/tokens"], agent["std/tokens"]) == (0.5, 4, 0)


def test_missing_rollouts_are_refused_unless_allowed():
    with pytest.raises(
        DataError, match=r"2 row\(s\) have no rollout; --allow-partial profiles the others\. Missing: 1:1, 1:2"
    ):
        profile(INPUTS, ROLLOUTS)


def test_rollouts_that_nobody_asked_for_and_rollouts_that_stand_twice_are_refused():
    with pytest.raises(DataError, match="belong to no row of the materialized inputs: 5:0"):
        profile(INPUTS, [*ROLLOUTS, rollout(5, 0, 1.0)], allow_partial=True)
    with pytest.raises(DataError, match="Task 1, rollout 0 stands twice in the rollouts"):
        profile(INPUTS, [*ROLLOUTS, ROLLOUTS[-1]], allow_partial=True)


def item(prompt: list[int], generated: list[int], **fields: Any) -> Row:
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": generated}
    return {"type": "message", "role": "assistant", "content": "", **fields, **tokens, "generation_log_probs": [-1.0]}


def log_of(*items: Row) -> list[dict[str, Any]]:
    return message_log({"response": {"output": list(items)}})


def test_what_was_read_and_what_was_generated_alternate():
    log = log_of(item([1, 2], [3]), {"type": "function_call_output", "output": "x"}, item([1, 2, 3, 4], [5]))
    assert [(one["role"], one["token_ids"]) for one in log] == [
        ("user", [1, 2]),
        ("assistant", [3]),
        ("user", [4]),
        ("assistant", [5]),
    ]
    assert log[1]["generation_logprobs"] == [-1.0]


def test_tags_in_the_text_are_flagged():
    flags = ("is_invalid_tool_call", "has_malformed_thinking")
    thoughts = {"type": "reasoning", "summary": [{"text": "<think>a<think>b"}]}
    for changes, expected in (
        ({"content": "fine"}, (False, False)),
        ({"content": [{"text": "<tool_call>{"}]}, (True, False)),
        ({"content": "</think>"}, (False, True)),
        (thoughts, (False, True)),
    ):
        _, reply = log_of(item([1], [2], **changes))
        assert tuple(reply[name] for name in flags) == expected


def test_a_broken_history_and_a_rollout_without_tokens_are_refused():
    with pytest.raises(DataError, match="Output item 1: its prompt does not begin with the 3 tokens before it"):
        log_of(item([1, 2], [3]), item([9], [5]))
    with pytest.raises(DataError, match="nothing to train on"):
        log_of({"type": "message", "content": ""})
