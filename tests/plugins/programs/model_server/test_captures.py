"""Calls recorded for agents that do not echo their items."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from roundhouse.plugins.nemo_gym.clients.agent import turns_from_items
from roundhouse.plugins.programs.model_server.answer import AnswerTokens, ModelAnswer
from roundhouse.plugins.programs.model_server.captures import Captures, http_attempt
from roundhouse.rollout.conversation import chain_calls
from tests.plugins.programs.model_server.conftest import Served
from tests.plugins.programs.model_server.fake_engine import FakeEngine, call, say

CAPTURING = "/ng-rollout/7-0/training-token-capture"


def chat(client: httpx.Client, prefix: str, messages: list[dict[str, Any]]) -> httpx.Response:
    return client.post(f"{prefix}/v1/chat/completions", json={"messages": messages})


def test_an_opaque_agents_calls_are_recorded_in_every_dialect_and_deleted_on_request(served: Served):
    client = served(FakeEngine())
    user = [{"role": "user", "content": "x"}]
    chat(client, CAPTURING, user)
    client.post(f"{CAPTURING}/v1/messages", json={"messages": user, "max_tokens": 3})
    client.post(f"{CAPTURING}/v1/responses", json={"input": "y", "stream": True})
    chat(client, "/ng-rollout/7-0", user)
    record = client.get("/captures/7-0").json()
    assert [item["call"] for item in record["calls"]] == [0, 1, 2]
    assert (record["complete"], record["in_flight"]) == (True, 0)
    for item in record["calls"]:
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        assert (item["policy_version"], item["finish_reason"]) == (3, "stop")
        assert time.time() - item["started_at"] < 60
    assert client.delete("/captures/7-0").json() == {"deleted": True}
    assert client.get("/captures/7-0").status_code == 404


@pytest.mark.parametrize("tokens", ["message", "reply"])
def test_which_version_drew_which_token_reaches_the_turns_of_an_agent_behind_the_model_server(
    served: Served, tokens: str
) -> None:
    """By the record, by the items of a Responses reply, and by the model server's chat route; the engine is not sent them."""

    class Refitted(FakeEngine):
        def completion(self, asked: dict[str, Any]) -> dict[str, Any]:
            told = super().completion(asked)
            return told | {"version_spans": [{"version": 3, "tokens": 1}, {"version": 4, "tokens": 10**6}]}

    engine = Refitted(tokens=tokens)
    client = served(engine)
    user = [{"role": "user", "content": "x"}]
    reply = chat(client, CAPTURING, user).json()["choices"][0]["message"]
    spans = [{"version": 3, "tokens": 1}, {"version": 4, "tokens": 10**6}]
    assert reply["version_spans"] == spans
    [turn] = chain_calls(client.get("/captures/7-0").json()["calls"]).turns
    assert (turn.policy_version, turn.version_spans) == (3, spans)
    response = client.post("/v1/responses", json={"input": "x"}).json()
    [turn] = turns_from_items(response, policy_version=9)
    assert (turn.policy_version, turn.version_spans) == (3, spans)
    assert chat(client, "", [*user, reply, *user]).status_code == 200
    assert engine.requests[-1]["messages"][1]["generation_token_ids"]
    assert "version_spans" not in str(engine.requests[-1])


def test_the_record_of_an_agent_that_strips_the_token_fields_chains_where_its_prompts_continue(served: Served):
    """Byte tokens render a history unchanged, so the chain is that of a faithful tokenizer."""

    class Rendering(FakeEngine):
        def completion(self, asked: dict[str, Any]) -> dict[str, Any]:
            told = super().completion(asked)
            message = told["choices"][0]["message"]
            message["prompt_token_ids"] = rendered(asked["messages"])
            message["generation_token_ids"] = list(b"ok;")
            message["generation_log_probs"] = [-0.1] * 3
            return told

    def rendered(messages: list[dict[str, Any]]) -> list[int]:
        return list("".join(f"{message['content']};" for message in messages).encode())

    client = served(Rendering(tokens="message"))
    messages = [{"role": "user", "content": "a"}]
    for question in ("b", "c"):
        answer = chat(client, CAPTURING, messages).json()["choices"][0]["message"]
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": question}]
    chat(client, CAPTURING, messages)
    chat(client, CAPTURING, [{"role": "user", "content": "summary"}])
    chained = chain_calls(client.get("/captures/7-0").json()["calls"])
    assert chained.reason is None
    assert [turn.parent for turn in chained.turns] == [None, 0, 1, None]


def play(client: httpx.Client, dialect: str) -> None:
    """Make three calls as an agent that keeps its own history without token fields."""
    if dialect == "chat":
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        for question in "bcd":
            told = chat(client, CAPTURING, messages).json()["choices"][0]["message"]
            message = {key: told[key] for key in ("role", "content", "tool_calls")}
            result = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": question}
            messages += [message, result]
        return
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    for question in "bcd":
        reply = client.post(f"{CAPTURING}/v1/messages", json={"messages": messages, "max_tokens": 3}).json()
        used = reply["content"][-1]["id"]
        result = {"type": "tool_result", "tool_use_id": used, "content": question}
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("dialect", ["chat", "messages"])
@pytest.mark.parametrize(("continues", "parents"), [(True, [None, 0, 1]), (False, [None, None, None])])
def test_the_prompts_of_an_agent_that_echoes_no_tokens_continue_what_was_recorded(
    served: Served, dialect: str, continues: bool, parents: list[int | None]
):
    """The engine's rendering never reproduces the tokens that it drew, as when a tokenizer merges a text differently."""
    engine = FakeEngine(reply=say("<think>hm</think>ok", tool_calls=[call()]))
    client = served(engine, capture_continues=continues)
    play(client, dialect)
    chained = chain_calls(client.get("/captures/7-0").json()["calls"])
    assert chained.reason is None
    assert [turn.parent for turn in chained.turns] == parents


def test_an_edited_history_and_another_rollouts_history_are_not_continued(served: Served):
    engine = FakeEngine()
    client = served(engine)
    user = {"role": "user", "content": "x"}
    answer = chat(client, CAPTURING, [user]).json()["choices"][0]["message"]["content"]
    said = {"role": "assistant", "content": answer}
    for prefix, messages in (
        (CAPTURING, [user, {**said, "content": "edited"}, user]),
        (CAPTURING, [{"role": "user", "content": "y"}, said, user]),
        (CAPTURING.replace("7-0", "8-0"), [user, said, user]),
    ):
        chat(client, prefix, messages)
        assert all("prompt_token_ids" not in message for message in engine.requests[-1]["messages"])
    chat(client, CAPTURING, [user, said, user])
    assert "prompt_token_ids" in engine.requests[-1]["messages"][1]


def numbers(client: httpx.Client) -> list[int]:
    return [item["call"] for item in client.get("/captures/7-0").json()["calls"]]


def test_two_requests_with_one_prompt_are_two_calls(served: Served):
    client = served(FakeEngine())
    for _ in range(2):
        chat(client, CAPTURING, [{"role": "user", "content": "x"}])
    record = client.get("/captures/7-0").json()
    assert (len(record["calls"]), record["complete"]) == (2, True)
    assert [turn.parent for turn in chain_calls(record["calls"]).turns] == [None, None]


def ask(client: httpx.Client, **headers: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "x"}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(f"{CAPTURING}/v1/chat/completions", json=body, headers=named)


def test_a_request_that_is_repeated_since_its_answer_was_lost_counts_once(served: Served):
    client = served(FakeEngine())
    for key in ("a", "a", "b"):
        ask(client, Idempotency_Key=key)
    assert numbers(client) == [1, 2]
    for retry in ("0", "1", "2"):  # as the SDKs of OpenAI and Anthropic count them
        ask(client, X_Stainless_Retry_Count=retry)
    assert numbers(client) == [1, 2, 5]
    assert client.get("/health").json()["captures"]["calls"] == 3


def test_a_retry_after_a_failure_leaves_the_other_answers_to_the_prompt_alone(served: Served):
    faults = iter([None, (500, b"x")])
    client = served(FakeEngine(fault=lambda body: next(faults, None)))
    for retry in ("0", "0", "1"):
        ask(client, X_Stainless_Retry_Count=retry)
    assert numbers(client) == [0, 2]


def test_a_retry_that_could_stand_for_either_of_two_answers_makes_the_record_incomplete(served: Served):
    client = served(FakeEngine())
    for retry in ("0", "0", "1"):
        ask(client, X_Stainless_Retry_Count=retry)
    assert client.get("/captures/7-0").json()["complete"] is False


def test_a_repeated_request_that_is_still_in_flight_leaves_no_record():
    captures = Captures(max_calls=10, max_bytes=10**6, max_age_seconds=60)
    attempt = http_attempt({b"idempotency-key": b"a"}, {})
    first, second = (captures.begin("7-0", attempt) for _ in range(2))
    captures.record("7-0", second, answer())
    captures.record("7-0", first, answer())
    found = captures.read("7-0")
    assert found is not None
    assert ([item["call"] for item in found["calls"]], found["complete"]) == ([second], True)


def test_a_rollouts_calls_name_it_to_the_engine_which_may_be_several_replicas(served: Served):
    engine = FakeEngine()
    client = served(engine)
    for prefix in (CAPTURING, "/ng-rollout/7-0", "", ""):
        chat(client, prefix, [{"role": "user", "content": "x"}])
    first, second, *others = (each[b"x-session-id"] for each in engine.headers)
    assert first == second == b"7-0"
    assert len(set(others)) == 1, "a client that keeps its cookie"
    assert others[0] != first


def test_capture_for_all_needs_no_wish_in_the_path(served: Served):
    client = served(FakeEngine(), capture_all=True)
    chat(client, "/ng-rollout/7-0", [{"role": "user", "content": "x"}])
    chat(client, "", [{"role": "user", "content": "x"}])
    assert len(client.get("/captures/7-0").json()["calls"]) == 1


def test_tokens_are_recorded_even_where_callers_are_not_shown_them(served: Served):
    client = served(FakeEngine(), return_token_id_information=False)
    reply = chat(client, CAPTURING, [{"role": "user", "content": "x"}])
    assert "prompt_token_ids" not in reply.json()["choices"][0]["message"]
    assert client.get("/captures/7-0").json()["calls"][0]["prompt_token_ids"]


def test_failed_calls_and_prompts_that_do_not_fit_leave_no_record(served: Served):
    faults = iter([(400, b"context length"), (500, b"x")])
    client = served(FakeEngine(fault=lambda body: next(faults, None)))
    for _ in range(3):
        chat(client, CAPTURING, [{"role": "user", "content": "x"}])
    record = client.get("/captures/7-0").json()
    assert ([item["call"] for item in record["calls"]], record["in_flight"]) == ([2], 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},  # of a site that lets its name point here
        *({name: "203.0.113.7"} for name in ("x-forwarded-for", "x-real-ip", "forwarded", "via")),
    ],
    ids=str,
)
def test_captures_without_a_token_answer_no_stranger_who_comes_from_a_loopback_address(
    served: Served, headers: dict[str, str]
):
    client = served(FakeEngine())
    chat(client, CAPTURING, [{"role": "user", "content": "x"}])
    for method in ("GET", "DELETE"):
        assert client.request(method, "/captures/7-0", headers=headers).status_code == 403
    assert client.get("/captures/7-0").status_code == 200


def test_captures_answer_to_their_token_only(served: Served):
    client = served(FakeEngine(), capture_token="open")
    chat(client, CAPTURING, [{"role": "user", "content": "x"}])
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert client.get("/captures/7-0", headers=headers).status_code == 403
        assert client.delete("/captures/7-0", headers=headers).status_code == 403
    assert client.get("/captures/7-0", headers={"authorization": "Bearer open"}).status_code == 200


def test_the_engine_may_not_tell_its_version(served: Served):
    client = served(FakeEngine(policy_version=None))
    chat(client, CAPTURING, [{"role": "user", "content": "x"}])
    assert client.get("/captures/7-0").json()["calls"][0]["policy_version"] is None


# -- the bounds -----------------------------------------------------------------------------------------------------


def answer(count: int = 1) -> ModelAnswer:
    return ModelAnswer({}, "stop", "m", AnswerTokens([1] * count, [2], [-0.5]))


def record(captures: Captures, rollout: str, count: int = 1) -> None:
    captures.record(rollout, captures.begin(rollout), answer(count))


@pytest.mark.parametrize("bounds", [{"max_calls": 3}, {"max_bytes": 3 * (4 + 4 + 8)}])
def test_too_many_calls_cost_the_longest_untouched_rollout_which_says_so_for_ever(bounds: dict[str, int]):
    captures = Captures(**{"max_calls": 100, "max_bytes": 10**6, "max_age_seconds": 60} | bounds)
    for rollout in ("a", "b", "a", "c"):
        record(captures, rollout)
    assert captures.read("b") == {"calls": [], "complete": False, "in_flight": 0}
    assert [len(json.loads(json.dumps(captures.read(name)))["calls"]) for name in "ac"] == [2, 1]
    record(captures, "b")
    late = captures.read("b")
    assert late is not None
    assert (len(late["calls"]), late["complete"]) == (1, False)
    assert captures.delete("b")
    assert captures.read("b") is None
    assert (captures.calls, captures.bytes) == (1, 16)


def test_a_rollout_larger_than_the_memory_is_lost_and_not_cut():
    captures = Captures(100, 100, 60)
    record(captures, "a", count=1000)
    assert captures.read("a") == {"calls": [], "complete": False, "in_flight": 0}
    assert captures.bytes == 0


def test_records_age():
    now = 0.0
    captures = Captures(100, 10**6, 60, clock=lambda: now)
    record(captures, "a")
    now = 50.0
    record(captures, "a")
    now = 100.0
    assert len((captures.read("a") or {})["calls"]) == 2
    now = 200.0
    assert (captures.read("a") or {})["complete"] is False


def test_a_call_that_ends_after_its_record_went_makes_the_rest_incomplete():
    captures = Captures(100, 10**6, 60)
    number = captures.begin("a")
    assert (captures.read("a") or {})["in_flight"] == 1
    captures.delete("a")
    captures.record("a", number, answer())
    assert (captures.read("a") or {})["complete"] is False
    assert not captures.delete("nothing")


@pytest.mark.parametrize(
    "bound",
    [{"capture_max_calls": 1}, {"capture_max_mebibytes": 1}, {"capture_max_age_seconds": 1e-6}],
    ids=lambda bound: next(iter(bound)),
)
def test_a_server_keeps_records_within_its_configured_bounds(served: Served, bound: dict[str, Any]):
    client = served(FakeEngine(), **bound)
    for rollout in ("7-0", "8-0"):
        chat(client, CAPTURING.replace("7-0", rollout), [{"role": "user", "content": "x" * 200_000}])
    assert client.get("/captures/7-0").json()["complete"] is False
