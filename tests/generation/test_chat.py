"""Chat completions on token IDs: the same claims for vLLM under Ray Serve and for the transformers backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import NEUTRAL, Generated, read_request
from tests.generation import tiny
from tests.generation.servers import transformers_server

pytestmark = pytest.mark.real

LONG = [{"role": "user", "content": "Tell me about " + "12345 hello world " * 64}]
"""More than 128 tokens: vLLM's CPU cache works in blocks of 128, so shorter prompts never meet the prefix cache."""


@pytest.fixture(scope="module")
def transformers_url(policies: dict[str, Path]) -> Iterator[str]:
    with transformers_server(policies["first"]) as url:
        yield url


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def url(request: pytest.FixtureRequest) -> str:
    """Base URL of a server that answers with the policy `first`."""
    if request.param == "transformers":
        return request.getfixturevalue("transformers_url")
    from roundhouse.generation import deployment

    serve, policies = request.getfixturevalue("deployed"), request.getfixturevalue("policies")
    config, bare = request.getfixturevalue("config"), request.getfixturevalue("bare")
    deployment.RayServeEngine(serve).ensure(config, bare, str(policies["first"]), 1)
    return serve.http_url


@pytest.fixture(scope="module")
def tokenizer(policies: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(policies["first"])


def chat(url: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "policy", "messages": messages, "max_tokens": 12, "temperature": 1.0, "seed": 7} | fields
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-policy-version"] == str(reply.json()["policy_version"])
    return reply.json()


def test_a_reply_carries_tokens_log_probabilities_and_the_version(url, tokenizer):
    reply = chat(url, tiny.TOOL_MESSAGES)
    message = reply["choices"][0]["message"]
    rendered = tokenizer.apply_chat_template(tiny.TOOL_MESSAGES, add_generation_prompt=True, tokenize=False)
    assert message["prompt_token_ids"] == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert len(message["generation_token_ids"]) == len(message["generation_log_probs"]) == 12
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["policy_version"] == 1
    assert reply["usage"]["completion_tokens"] == 12


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(url):
    assert len(chat(url, LONG)["choices"][0]["message"]["prompt_token_ids"]) > 128
    first, again, other = (chat(url, LONG, seed=seed)["choices"][0]["message"] for seed in (3, 3, 4))
    assert first["generation_token_ids"] == again["generation_token_ids"]
    assert first["generation_token_ids"] != other["generation_token_ids"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("messages", [tiny.TOOL_MESSAGES, LONG], ids=["short", "long"])
def test_log_probabilities_agree_with_plain_transformers(url, policies, messages, temperature):
    """Its generation_config.json names another temperature, top_k, top_p and a penalty (conftest.py)."""
    message = chat(url, messages, temperature=temperature, max_tokens=24)["choices"][0]["message"]
    expected = tiny.reference_logprobs(
        policies["first"], message["prompt_token_ids"], message["generation_token_ids"], temperature
    )
    assert message["generation_log_probs"] == pytest.approx(expected, abs=1e-4)


def test_greedy_is_greedy_whatever_the_seed(url):
    answers = [chat(url, LONG, temperature=0, seed=s)["choices"][0]["message"]["generation_token_ids"] for s in (1, 2)]
    assert answers[0] == answers[1]


def test_a_later_turn_continues_tokens_that_the_tokenizer_would_merge(url, tokenizer):
    """The reply is recorded byte by byte but re-rendered as merged tokens: only continuation keeps the sampled tokens."""
    first = chat(url, tiny.TOOL_MESSAGES)["choices"][0]["message"]
    bytewise = [tokenizer.convert_tokens_to_ids(token) for token in "hello"] + [tokenizer.eos_token_id]
    assert tokenizer("hello", add_special_tokens=False)["input_ids"] != bytewise[:-1]
    recorded = {
        "role": "assistant",
        "content": "hello",
        "prompt_token_ids": first["prompt_token_ids"],
        "generation_token_ids": bytewise,
        "generation_log_probs": [-1.0] * len(bytewise),
    }
    following = {"role": "user", "content": "hello world"}
    so_far = first["prompt_token_ids"] + bytewise
    plain = {key: recorded[key] for key in ("role", "content")}
    rerendered = chat(url, [*tiny.TOOL_MESSAGES, plain, following])["choices"][0]["message"]["prompt_token_ids"]
    assert rerendered[: len(so_far)] != so_far

    continued = chat(url, [*tiny.TOOL_MESSAGES, recorded, following])["choices"][0]["message"]["prompt_token_ids"]
    assert continued[: len(so_far)] == so_far
    tail = "\n<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert continued[len(so_far) :] == tokenizer(tail, add_special_tokens=False)["input_ids"]


def test_a_generation_cut_by_length_is_continued_with_the_end_of_turn(url, tokenizer):
    first = chat(url, tiny.TOOL_MESSAGES, max_tokens=5)["choices"][0]
    assert first["finish_reason"] == "length"
    message = first["message"]
    so_far = message["prompt_token_ids"] + message["generation_token_ids"]
    prompt = chat(url, [*tiny.TOOL_MESSAGES, message, {"role": "user", "content": "go on"}])["choices"][0]["message"][
        "prompt_token_ids"
    ]
    assert prompt[: len(so_far)] == so_far
    assert prompt[len(so_far)] == tokenizer.eos_token_id


def test_three_turns_each_begin_with_the_tokens_so_far(url):
    messages: list[dict[str, Any]] = list(tiny.TOOL_MESSAGES)
    so_far: list[int] = []
    for turn in range(3):
        message = chat(url, messages, tools=[tiny.ADD_TOOL], seed=turn)["choices"][0]["message"]
        assert message["prompt_token_ids"][: len(so_far)] == so_far
        assert len(message["prompt_token_ids"]) > len(so_far)
        so_far = message["prompt_token_ids"] + message["generation_token_ids"]
        messages += [message, {"role": "user", "content": f"And {turn}?"}]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"temperature": "hot"}, 400, "invalid_request"),
        ({"max_tokens": 0}, 400, "invalid_request"),
        ({"seed": -1}, 400, "invalid_request"),
        ({"messages": []}, 400, "invalid_request"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request"),
        ({"stream": True}, 400, "invalid_request"),
        ({"n": 2}, 400, "invalid_request"),
        ({"tool_choice": "required"}, 400, "invalid_request"),
        ({"messages": [{"role": "user", "content": "hello world " * 400}]}, 400, "context_length_exceeded"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_a_code(url, fields, status, code):
    body = {"model": "policy", "messages": tiny.TOOL_MESSAGES} | fields
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


NOT_HONOURED = {
    "stop_token_ids": [5],
    "min_tokens": 3,
    "ignore_eos": True,
    "guided_json": {"type": "object"},
    "structured_outputs": {"regex": "a+"},
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2],
    "top_logprobs": 3,
    "prompt_logprobs": 1,
    "priority": 7,
    "reasoning_effort": "low",
    "logprobs": 5,
    "some_field_of_tomorrow": 1,
}


@pytest.mark.parametrize("field", NOT_HONOURED)
def test_a_field_that_is_not_honoured_is_refused_by_its_name(transformers_url, field):
    body = {"model": "policy", "messages": tiny.TOOL_MESSAGES, field: NOT_HONOURED[field]}
    reply = httpx.post(f"{transformers_url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert field in reply.json()["error"]["message"]


def test_fields_at_the_values_that_change_nothing_are_taken(transformers_url):
    neutral = {key: values[-1] for key, values in NEUTRAL.items() if key != "tool_choice"}
    nulls = dict.fromkeys(NOT_HONOURED)
    plain = chat(transformers_url, tiny.TOOL_MESSAGES)["choices"]
    assert chat(transformers_url, tiny.TOOL_MESSAGES, **neutral)["choices"] == plain
    assert chat(transformers_url, tiny.TOOL_MESSAGES, **nulls)["choices"] == plain


def test_log_probabilities_that_are_asked_for_are_those_of_the_message(transformers_url):
    choice = chat(transformers_url, tiny.TOOL_MESSAGES, logprobs=True)["choices"][0]
    told = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in told] == choice["message"]["generation_log_probs"]
    assert len(told) == 12


def test_without_parallel_tool_calls_the_message_keeps_the_first_call(policies):
    codec = ChatCodec(str(policies["first"]), 512)
    call = '<tool_call>{"name": "add", "arguments": {"n": %d}}</tool_call>'
    tokens = codec.encode(call % 1 + call % 2)
    generated = Generated(tokens, [-0.1] * len(tokens), "stop")
    both, _ = codec.message(generated, [tiny.ADD_TOOL])
    first, finish = codec.message(generated, [tiny.ADD_TOOL], only_first_call=True)
    assert [one["function"]["arguments"] for one in both["tool_calls"]] == ['{"n": 1}', '{"n": 2}']
    assert [one["function"]["arguments"] for one in first["tool_calls"]] == ['{"n": 1}']
    assert finish == "tool_calls"
    request = {"messages": tiny.TOOL_MESSAGES, "parallel_tool_calls": False}
    assert read_request(request, "policy").only_first_call


def test_recorded_tokens_outside_the_vocabulary_are_refused(url):
    message = {"role": "assistant", "content": "x", "prompt_token_ids": [1], "generation_token_ids": [10**6]}
    body = {"messages": [*tiny.TOOL_MESSAGES, message | {"generation_log_probs": [-1.0]}], "model": "policy"}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "outside" in reply.json()["error"]["message"]


def test_the_other_openai_routes_answer(url, tokenizer):
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["policy"]
    body = {"model": "policy", "messages": tiny.TOOL_MESSAGES}
    tokens = httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"]
    assert tokens == chat(url, tiny.TOOL_MESSAGES)["choices"][0]["message"]["prompt_token_ids"]
    plain = httpx.post(f"{url}/tokenize", json={"model": "policy", "prompt": "hello"}, timeout=60).json()["tokens"]
    assert plain == tokenizer("hello", add_special_tokens=False)["input_ids"]
    text = httpx.post(f"{url}/detokenize", json={"model": "policy", "tokens": tokens}, timeout=60).json()["prompt"]
    assert text == tokenizer.decode(tokens)
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/nowhere").status_code == 404


def test_tokenize_continues_the_recorded_tokens_and_a_prefix_can_be_required(url):
    """NeMo Gym's model server asks /tokenize for the prompt if the engine does not return it."""
    first = chat(url, LONG)["choices"][0]["message"]
    messages = [*LONG, first, {"role": "user", "content": "and?"}]
    recorded = first["prompt_token_ids"] + first["generation_token_ids"]
    bare = [*LONG, {"role": "assistant", "content": first["content"]}, messages[-1]]
    wanted = chat(url, messages)["choices"][0]["message"]["prompt_token_ids"]
    assert wanted[: len(recorded)] == recorded
    for body in ({"messages": messages}, {"messages": bare, "required_prefix_token_ids": recorded}):
        reply = httpx.post(f"{url}/tokenize", json={"model": "policy", **body}, timeout=60)
        assert reply.json()["tokens"] == wanted
    required = chat(url, bare, required_prefix_token_ids=recorded)["choices"][0]["message"]["prompt_token_ids"]
    assert required == wanted
    refused = httpx.post(f"{url}/tokenize", json={"messages": LONG, "required_prefix_token_ids": [1]}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "required_prefix_token_ids")


def test_what_nemo_gyms_model_server_sends_beside_the_conversation_changes_nothing(url):
    sent = {
        "logprobs": True,
        "top_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "metadata": {"extra_body": "{}", "note": "x"},
        "parallel_tool_calls": True,
        "stream": None,
        "tool_choice": "auto",
    }
    told = [*LONG, {"role": "assistant", "content": "ok", "reasoning": "hm", "reasoning_content": "hm"}, LONG[0]]
    assert chat(url, LONG, **sent)["choices"] == chat(url, LONG)["choices"]
    assert chat(url, told, **sent)["choices"][0]["message"]["generation_token_ids"]


def test_a_conversation_that_does_not_fit_is_refused_in_the_words_that_model_servers_look_for(url):
    reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": LONG * 8}, timeout=60)
    assert reply.status_code == 400
    assert "context length" in reply.text
