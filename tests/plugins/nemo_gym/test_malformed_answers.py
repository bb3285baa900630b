"""One malformed value in an agent's answer costs its own rollout, which fails by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.errors import DataError, InfraError
from roundhouse.plugins.nemo_gym.clients.agent import read_answer, turns_from_items
from roundhouse.rollout.protocol import BadAgentAnswer
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import recorded_rollout, tables_of
from tests.trajectories.rollouts import rollout
from tests.trajectories.test_malformed_replies import JSON, WRONG, call


def answer(**changes: Any) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": "hi", **call(**changes)}
    return {"reward": 1.0, "response": {"output": [item]}}


@pytest.mark.parametrize(("field", "value"), WRONG.values(), ids=WRONG.keys())
def test_an_answer_with_a_malformed_field_is_refused_by_its_name(field: str, value: Any):
    with pytest.raises(BadAgentAnswer, match=field):
        turns_from_items(answer(**{field: value})["response"], 0)


@given(st.dictionaries(st.sampled_from(["reward", "response", "metrics", "reward_components", "truncated"]), JSON))
def test_any_json_in_an_agents_answer_is_a_rollout_or_a_typed_failure(changes: dict[str, Any]):
    row = {"task_id": "t", "responses_create_params": {"input": "hi"}}
    try:
        found = read_answer(answer() | changes, row)
    except (DataError, InfraError):
        return
    own = rollout()
    own.items, own.metrics, own.reward = found.items, found.verdict.metrics, found.verdict.reward
    assert recorded_rollout(own)[0] is own


@given(JSON)
def test_any_json_as_an_item_is_recorded_or_a_typed_failure(item: Any):
    row = {"task_id": "t", "responses_create_params": {"input": "hi"}}
    for value in (
        item,
        {"type": item},
        {"role": item},
        {"type": "function_call", "name": item},
        {"content": item, "role": "user"},
    ):
        try:
            found = read_answer({"reward": 1.0, "response": {"output": [value]}}, row)
        except DataError:
            continue
        tables_of([Rollout("g", 0, row, "e", Status.COMPLETED, reward=1.0, items=found.items)])
