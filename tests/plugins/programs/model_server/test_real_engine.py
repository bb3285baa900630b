"""The model server in front of a real engine: the repository's chat server on transformers, with a tiny trained policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from roundhouse.rollout.conversation import chain_calls
from tests.generation import tiny
from tests.generation.servers import transformers_server
from tests.plugins.programs.model_server.conftest import Served

TOOL = {"type": "function", "strict": True, **tiny.ADD_TOOL["function"]}
FIELDS: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 40, "temperature": 0.0, "top_p": 1.0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of an engine with a policy that answers "What is 2 + 3?" with a call of `add`."""
    policy: Path = tiny.teach_tool_call(tmp_path_factory.mktemp("policy"), seed=5)
    with transformers_server(policy) as url:
        yield url


def answer_of(client: httpx.Client, items: list[dict[str, Any]], prefix: str = "", **fields: Any) -> dict[str, Any]:
    reply = client.post(f"{prefix}/v1/responses", json={"input": items, **FIELDS, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_three_turns_of_a_tool_conversation_are_one_unbroken_sequence_of_tokens(served: Served, engine: str):
    client = served(engine)
    items: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 3?"}]
    first = answer_of(client, items)
    (call,) = first["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 2, "b": 3})
    items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}]
    second = answer_of(client, items, temperature=1.0, metadata={"extra_body": '{"seed": 3}'})
    items += [*second["output"], {"role": "user", "content": "What is 2 + 3?"}]
    third = answer_of(client, items)
    seen: list[int] = []
    for response in (first, second, third):
        last = response["output"][-1]
        assert last["prompt_token_ids"][: len(seen)] == seen
        seen = last["prompt_token_ids"] + last["generation_token_ids"]
        assert len(last["generation_log_probs"]) == response["usage"]["output_tokens"]


def test_an_agent_that_echoes_no_tokens_leaves_a_record_that_chains(served: Served, engine: str):
    """Random text at temperature 1: the sampled tokens are rarely the tokenizer's."""
    client, prefix = served(engine), "/ng-rollout/7-0/training-token-capture"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for seed in range(3):
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 30, "seed": seed}
        reply = client.post(f"{prefix}/v1/chat/completions", json={"messages": messages, **sampling})
        content = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "hello"}]
    record = client.get("/captures/7-0").json()
    chained = chain_calls(record["calls"])
    assert (record["complete"], chained.reason) == (True, None)
    assert [turn.parent for turn in chained.turns] == [None, 0, 1]
    assert {turn.policy_version for turn in chained.turns} == {1}


def test_a_conversation_that_outgrows_the_model_ends_incomplete(served: Served, engine: str):
    response = answer_of(served(engine), [{"role": "user", "content": "What is 2 + 3? " * 200}])
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == ""


def test_sampling_that_the_engine_refuses_is_the_requests_fault(served: Served, engine: str):
    reply = served(engine, sampling_overrides={"min_p": 0.5}).post("/v1/responses", json={"input": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "engine_rejected")
    assert "min_p" in reply.json()["error"]["message"]
