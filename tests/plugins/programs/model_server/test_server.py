"""The model server's wire: dialects, cookies, errors, limits."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from roundhouse.plugins.programs.model_server.__main__ import configuration
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from tests.plugins.programs.model_server.conftest import Served
from tests.plugins.programs.model_server.fake_engine import FakeEngine, call, prompt_of, say
from tests.plugins.programs.model_server.test_dialects import events
from tests.waiting import until

TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def ask(client: httpx.Client, given: Any = "hi", path: str = "", **fields: Any) -> dict[str, Any]:
    reply = client.post(f"{path}/v1/responses", json={"input": given, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_tool_conversation_keeps_the_tokens_and_each_call_sends_the_newest_only(served: Served):
    engine = FakeEngine(reply=say("<think>hm</think>", tool_calls=[call()]))
    client = served(engine)
    items: list[dict[str, Any]] = [{"role": "user", "content": "add"}]
    seen: list[int] = []
    for turn in range(4):
        output = ask(client, items)["output"]
        assert [item["type"] for item in output] == ["reasoning", "function_call"]
        prompt, generation, _ = (output[-1][name] for name in TOKENS)
        assert prompt[: len(seen)] == seen
        seen = prompt + generation
        items += [*output, {"type": "function_call_output", "call_id": "c1", "output": str(turn)}]
    carriers = [sum("prompt_token_ids" in message for message in asked["messages"]) for asked in engine.requests]
    assert carriers == [0, 1, 1, 1]
    assert all(asked["return_tokens_as_token_ids"] for asked in engine.requests)


@pytest.mark.parametrize("where", ["message", "reply", "both", "logprobs"])
def test_the_prompt_is_known_wherever_the_engine_tells_tokens(served: Served, where: str):
    engine = FakeEngine(tokens=where)
    output = ask(served(engine))["output"]
    assert output[0]["prompt_token_ids"] == prompt_of(engine.requests[0]["messages"])
    assert len(engine.tokenized) == (where == "logprobs")
    if engine.tokenized:
        assert engine.tokenized[0] == {key: engine.requests[0][key] for key in ("model", "messages")}


def test_every_answer_sends_the_cookie_again_and_the_session_stays(served: Served):
    client = served(FakeEngine())
    name = "ModelServer___m"
    sessions = []
    for method, path, body in (
        ("POST", "/v1/responses", {"input": "x"}),
        ("POST", "/v1/responses", {"wrong": 1}),
        ("POST", "/v1/chat/completions", {}),
        ("POST", "/nowhere", {}),
        ("GET", "/", None),
        ("GET", "/v1/responses", None),
    ):
        reply = client.request(method, path, json=body)
        assert name in reply.cookies, (method, path)
        sessions.append(reply.cookies[name].split(".")[0])
    assert len(set(sessions)) == 1
    assert "httponly; samesite=lax" in reply.headers["set-cookie"]
    assert {client.get(path).status_code for path in ("/", "/livez", "/health", "/healthz", "/readyz")} == {200}


def test_unknown_fields_are_refused_by_responses_and_ignored_by_chat(served: Served):
    engine = FakeEngine()
    client = served(engine)
    reply = client.post("/v1/responses", json={"input": "x", "top_k": 5})
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["type"] == "extra_forbidden"
    assert engine.requests == []
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "top_k": 5})
    assert chat.status_code == 200
    assert "top_k" not in engine.requests[0]


def test_a_body_that_is_no_json_is_refused(served: Served):
    reply = served(FakeEngine()).post("/v1/responses", content=b"{")
    assert (reply.status_code, reply.json()["detail"][0]["type"]) == (422, "value_error")


def test_chat_carries_the_tokens_in_its_message_and_takes_them_back(served: Served):
    engine = FakeEngine(reply=say("a", tool_calls=[call()]), finish_reason="tool_calls")
    client = served(engine)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    first = client.post("/v1/chat/completions", json={"messages": messages}).json()
    message = first["choices"][0]["message"]
    assert (first["object"], first["choices"][0]["finish_reason"]) == ("chat.completion", "tool_calls")
    assert first["policy_version"] == 3
    messages += [message, {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    again = client.post("/v1/chat/completions", json={"messages": messages}).json()["choices"][0]["message"]
    seen = message["prompt_token_ids"] + message["generation_token_ids"]
    assert again["prompt_token_ids"][: len(seen)] == seen


def test_the_messages_dialect_answers_with_tool_use(served: Served):
    client = served(FakeEngine(reply=say("<think>hm</think>ok", tool_calls=[call()])))
    body = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": "add"}], "betas": []}
    message = client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert (message["model"], message["stop_reason"]) == ("claude", "tool_use")
    streamed = client.post("/v1/messages", json=body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert events(streamed.content)[-1] == {"type": "message_stop"}


def test_streams_replay_the_whole_answer(served: Served):
    client = served(FakeEngine(reply=say("ok")))
    stream = events(client.post("/v1/responses", json={"input": "x", "stream": True, "client_metadata": {}}).content)
    assert stream[-1]["response"]["output"][0]["content"][0]["text"] == "ok"
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/chat/completions", json=body).content)
    assert "usage" in chunks[-1]
    assert all("prompt_token_ids" not in json.dumps(chunk) for chunk in chunks)


def test_a_failure_inside_a_stream_is_told_by_its_last_event(served: Served):
    client = served(FakeEngine(fault=lambda body: (500, b"boom")))
    reply = client.post("/v1/responses", json={"input": "x", "stream": True})
    assert reply.status_code == 200
    last = events(reply.content)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "boom" in last["response"]["error"]["message"]


def test_a_prompt_that_does_not_fit_is_an_empty_incomplete_answer_without_tokens(served: Served):
    text = b'{"error":{"message":"This model\'s maximum context length is 8 tokens."}}'
    client = served(FakeEngine(fault=lambda body: (400, text)))
    response = ask(client)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"] is None
    assert not set(TOKENS) & response["output"][0].keys()
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["choices"][0]["finish_reason"] == "length"


def test_reasoning_upon_reasoning_is_not_asked_for_where_it_is_not_allowed(served: Served):
    engine = FakeEngine()
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    response = ask(served(engine, sequential_reasoning_allowed=False), [{"role": "user", "content": "x"}, reasoning])
    assert response["incomplete_details"] == {"reason": "content_filter"}
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ((400, b'{"error":"no"}'), 400, "engine_rejected"),
        ((401, b"{}"), 502, "engine_failed"),
        ((500, b"x"), 502, "engine_failed"),
    ],
)
def test_an_engines_refusal_or_failure_is_told_once_and_not_repeated(
    served: Served, fault: tuple[int, bytes], status: int, code: str
):
    engine, other = FakeEngine(fault=lambda body: fault), FakeEngine(fault=lambda body: fault)
    reply = served(engine, other).post("/v1/responses", json={"input": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert len(engine.requests) + len(other.requests) == 1


def test_an_answer_without_the_tokens_that_were_asked_for_is_no_answer(served: Served):
    reply = served(FakeEngine(tokens="none")).post("/v1/responses", json={"input": "x"})
    assert reply.status_code == 502
    assert "token" in reply.json()["error"]["message"]


def test_without_token_information_none_is_asked_for(served: Served):
    engine = FakeEngine(tokens="none")
    response = ask(served(engine, return_token_id_information=False))
    assert "logprobs" not in engine.requests[0]
    assert not set(TOKENS) & response["output"][0].keys()


def test_secrets_go_to_the_engine_and_nowhere_else(served: Served, caplog: pytest.LogCaptureFixture):
    engine = FakeEngine(fault=lambda body: (500, b"key sk-secret of tenant-secret is bad"))
    fields: dict[str, Any] = {"api_key": "sk-secret", "default_headers": {"X-Tenant": "tenant-secret"}}
    client = served(engine, **fields)
    told = client.post("/v1/responses", json={"input": "x"}).text + client.get("/health").text
    told += repr(ModelServerConfig(base_url=["http://e"], **fields))
    with pytest.raises(ValidationError, match="api_key") as caught:
        ModelServerConfig(base_url=["http://user:url-secret@e"])
    told += str(caught.value)
    assert engine.headers[0][b"authorization"] == b"Bearer sk-secret"
    assert engine.headers[0][b"x-tenant"] == b"tenant-secret"
    assert "-secret" not in told + caplog.text


def test_an_engine_that_never_answers_is_a_timeout_within_the_limit(served: Served):
    client = served(FakeEngine(seconds=30), request_timeout_seconds=0.3)
    begun = time.monotonic()
    reply = client.post("/v1/responses", json={"input": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "engine_timeout")
    assert time.monotonic() - begun < 20, "the engine answers after 30 s"


def test_a_caller_that_leaves_frees_the_engine(served: Served):
    engine = FakeEngine(seconds=20)
    client = served(engine)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/responses", json={"input": "x"}, timeout=0.3)
    until(lambda: engine.cancelled, "the end of the engine's work")
    assert engine.cancelled == 1
    assert client.get("/health").json()["engines"][0]["in_flight"] == 0


def test_the_one_model_is_listed_and_named_whatever_callers_call_it(served: Served):
    engine = FakeEngine()
    client = served(engine, model="tiny")
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert ask(client, model="other")["model"] == "tiny"
    assert engine.requests[0]["model"] == "tiny"


def test_the_rollout_prefixes_are_stripped_from_any_path(served: Served):
    client = served(FakeEngine())
    for prefix in ("/ng-rollout/7-0", "/ng-rollout/7-0-a1/training-token-capture"):
        assert client.get(f"{prefix}/").json() == {"status": "ok"}
        ask(client, path=prefix)
    assert client.get("/ng-rollout/-bad/").status_code == 404


def test_a_command_line_names_engines_fields_and_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROUNDHOUSE_ENGINE_API_KEY", "sk-secret")
    config = configuration(["http://a:1", "http://b/v1/"], "tiny", ["max_attempts=2", 'extra_body={"seed": 1}'])
    assert config.base_url == ["http://a:1/v1", "http://b/v1"]
    assert (config.max_attempts, config.extra_body, config.api_key.get_secret_value()) == (2, {"seed": 1}, "sk-secret")
    for settings, problem in (
        (["max_attempts"], "field=value"),
        (["max_attempt=2"], "max_attempt"),
        (["api_key=1"], "api_key"),
    ):
        with pytest.raises(ValueError, match=problem) as caught:
            configuration(["http://a"], "m", settings)
        assert "sk-secret" not in str(caught.value)
    with pytest.raises(ValueError, match="base_url"):
        configuration(["a:1"], "m", [])


def test_the_payload_to_the_engine_grows_by_what_is_new_only(served: Served):
    engine = FakeEngine(reply=say("x" * 200))
    client = served(engine)
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for _ in range(9):
        items += [*ask(client, items)["output"], {"role": "user", "content": "more"}]
    sizes = [len(json.dumps(asked)) for asked in engine.requests]
    growth = [later - earlier for earlier, later in itertools.pairwise(sizes[1:])]
    assert max(growth) < 1.2 * min(growth)


def test_a_secret_is_refused_on_a_command_line() -> None:
    with pytest.raises(ValueError, match="ROUNDHOUSE_ENGINE_API_KEY") as refused:
        configuration(["http://engine"], "policy", ["api_key=canary-77aa10"])
    assert "canary-77aa10" not in str(refused.value)
