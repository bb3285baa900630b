"""Each place of a server's reply, replaced by another type: the reader returns valid values or raises a typed error."""

from typing import Any

import httpx
import orjson
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.config.yaml_text import load_yaml
from roundhouse.generation import deployment, exchange
from roundhouse.generation.client import read_completion
from roundhouse.generation.openai_engine import OpenAIEngine, TextEngine
from roundhouse.generation.protocol import BadReply
from tests.security.mutants import CALLS, attack, texts

CHOICE = {
    "token_ids": [3, 4],
    "logprobs": {"token_logprobs": [-0.5, -0.5]},
    "prompt_logprobs": [None, {"1": {"logprob": -0.1}}],
}
ENGINES: dict[type[OpenAIEngine], tuple[dict[str, Any], dict[str, Any]]] = {
    OpenAIEngine: (
        {"kind": "tokens", "weight_update": "vllm"},
        {"/v1/completions": {"choices": [CHOICE]}, "/collective_rpc": {"results": [1]}, "/reset_prefix_cache": {}},
    ),
    TextEngine: ({"kind": "text"}, {"/v1/completions": {"choices": [{"text": "hi", "finish_reason": "stop"}]}}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.__name__)
async def test_no_reply_of_a_foreign_engine_is_a_defect_or_an_invented_token(
    kind: type[OpenAIEngine], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attack(kind, *ENGINES[kind], call, monkeypatch)


def test_an_engine_of_another_shape_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "hi", "prompt_token_ids": [1], "generation_token_ids": [3]}
    message |= {"generation_log_probs": [-0.5]}
    replies: dict[str, Any] = {
        "/v1/models": {"data": [{"id": "policy"}]},
        "/v1/chat/completions": {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "policy_version": 0,
        },
        "/rh/parsed": {"text": "f", "message": {"tool_calls": [call]}},
        "/tokenize": {"tokens": [1]},
    }
    changed: dict[str, bytes] = {}
    transport = httpx.MockTransport(
        lambda request: httpx.Response(
            200 if request.url.path in replies else 404,
            content=changed.get(request.url.path, orjson.dumps(replies.get(request.url.path))),
        )
    )
    monkeypatch.setattr(
        exchange, "http_client", lambda *_, **__: httpx.Client(transport=transport, base_url="http://engine")
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for path in ("/tokenize", "/rh/parsed"):
        for text in texts(replies[path]):
            changed.clear()
            changed[path] = text
            problem = exchange.problem_of("http://engine", GenerationConfig(), [], [tool])
            assert problem is None or problem.remedy
        del replies[path]


@pytest.mark.parametrize(
    "content", [b"<html>", b"null", b'{"replicas": [3]}', b'{"replicas": [{"token_counter": []}]}']
)
def test_reports_of_another_shape_are_no_replicas(content: bytes) -> None:
    assert deployment.replicas_of(lambda: httpx.Response(200, content=content)) == []


@pytest.mark.parametrize("finish", [None, 3, "abort", ["stop"]])
def test_an_ending_that_no_column_holds_is_a_bad_reply(finish: Any) -> None:
    message = {"role": "assistant", "content": "hi", "prompt_token_ids": [1], "generation_token_ids": [3]}
    message |= {"generation_log_probs": [-0.5]}
    reply = {"choices": [{"message": message, "finish_reason": finish}], "policy_version": 0}
    with pytest.raises(BadReply, match="finish_reason"):
        read_completion(orjson.dumps(reply), 0.0, "http://engine")


def test_base_60_is_read_as_before() -> None:
    assert load_yaml("a: 1:30") == {"a": 90}
