"""Conversion of an engine's reply."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.generation.protocol import BadReply
from roundhouse.plugins.programs.model_server.answer import as_chat_completion, as_response, empty_answer, read_answer
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from roundhouse.rollout.responses import chat_messages

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -0.25]}
LOGPROBS = {"content": [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -0.25}]}


def config(**fields: Any) -> ModelServerConfig:
    return ModelServerConfig(base_url=["http://e"], **fields)


def reply(message: dict[str, Any] | None = None, choice: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    told = {"role": "assistant", "content": "hi"} | (message or {})
    return {"choices": [{"index": 0, "message": told, "finish_reason": "stop"} | (choice or {})], "created": 1} | fields


@pytest.mark.parametrize(
    "told",
    [
        reply(TOKENS),
        reply(None, {"token_ids": [3, 4], "logprobs": LOGPROBS}, prompt_token_ids=[1, 2]),
        reply(TOKENS, {"token_ids": [3, 4], "logprobs": LOGPROBS}, prompt_token_ids=[1, 2]),
        reply(TOKENS, {"logprobs": {"content": [{"token": " word", "logprob": -0.5}]}}),
    ],
    ids=["message", "reply", "all that agree", "log-probabilities of text"],
)
def test_the_token_ids_are_the_engines_wherever_it_tells_them(told: dict[str, Any]):
    answer = read_answer(told, config(), tokens=True)
    assert answer.tokens is not None
    assert answer.tokens.fields() == TOKENS


def test_where_only_log_probabilities_tell_the_prompt_is_left_open():
    answer = read_answer(reply(None, {"logprobs": LOGPROBS}), config(), tokens=True)
    assert answer.tokens is not None
    assert (answer.tokens.prompt, answer.tokens.generation, answer.tokens.log_probs) == (None, [3, 4], [-0.5, -0.25])


@pytest.mark.parametrize(
    "told",
    [
        reply(),
        reply({"prompt_token_ids": [1]}),
        reply(TOKENS | {"generation_log_probs": [-0.5]}),
        reply(None, {"token_ids": [3, 4], "logprobs": LOGPROBS}),
        reply(None, {"logprobs": LOGPROBS}, prompt_token_ids=[1]),
        reply(TOKENS, {"token_ids": [3, 5]}, prompt_token_ids=[1, 2]),
        reply(TOKENS, {"token_ids": [3, 4]}, prompt_token_ids=[1, 9]),
        reply(TOKENS | {"generation_token_ids": [3, 5]}, {"logprobs": LOGPROBS}),
        reply(None, {"token_ids": [3, 5], "logprobs": LOGPROBS}, prompt_token_ids=[1, 2]),
        reply(None, {"logprobs": {"content": [{"token": "token_id:x", "logprob": -0.5}]}}),
        reply(None, {"logprobs": {"content": [{"token": "token_id:3"}]}}),
        {"choices": []},
        [],
        None,
    ],
)
def test_partial_contradicting_and_absent_tokens_are_refused(told: Any):
    with pytest.raises(BadReply):
        read_answer(told, config(), tokens=True)


def test_reasoning_told_apart_becomes_a_think_block_and_then_an_item():
    for key in ("reasoning", "reasoning_content"):
        answer = read_answer(reply({key: "hm"} | TOKENS), config(), tokens=True)
        assert answer.message["content"] == "<think>hm</think>hi"
        output = as_response(answer, {}, config())["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"]
        assert [sorted(TOKENS.keys() & item.keys()) for item in output] == [[], sorted(TOKENS)]
        with pytest.raises(BadReply, match="uses_reasoning_parser"):
            read_answer(reply({key: "hm"}), config(uses_reasoning_parser=False), tokens=False)


def test_lone_reasoning_carries_the_tokens_and_without_a_parser_it_is_text():
    told = reply({"content": "<think>hm</think>"} | TOKENS)
    (item,) = as_response(read_answer(told, config(), tokens=True), {}, config())["output"]
    assert (item["type"], item["generation_token_ids"]) == ("reasoning", [3, 4])
    plain = config(uses_reasoning_parser=False)
    (item,) = as_response(read_answer(told, plain, tokens=True), {}, plain)["output"]
    assert item["content"][0]["text"] == "<think>hm</think>"


def test_token_fields_show_only_where_they_are_configured():
    hidden = config(return_token_id_information=False)
    answer = read_answer(reply(TOKENS), hidden, tokens=True)
    assert not TOKENS.keys() & as_response(answer, {}, hidden)["output"][-1].keys()
    assert not TOKENS.keys() & as_chat_completion(answer, hidden)["choices"][0]["message"].keys()


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_the_finish_reason_decides_the_status(finish: str, status: str, details: Any):
    response = as_response(read_answer(reply(None, {"finish_reason": finish}), config(), tokens=False), {}, config())
    assert (response["status"], response["incomplete_details"]) == (status, details)


def test_an_unanswered_call_is_one_empty_message_without_usage_and_tokens():
    response = as_response(empty_answer("m", "length"), {"input": "x"}, config())
    (item,) = response["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": []}]
    assert response["usage"] is None
    assert not TOKENS.keys() & item.keys()


def test_the_request_is_echoed_and_what_it_left_out_is_null():
    response = as_response(
        empty_answer("m", "stop"), {"input": "x", "temperature": 0.5, "store": True}, config(model="m")
    )
    assert (response["temperature"], response["top_p"], response["tool_choice"]) == (0.5, None, "auto")
    assert (response["parallel_tool_calls"], response["tools"], response["model"]) == (True, [], "m")
    assert not {"input", "store", "include", "stream"} & response.keys()


def test_details_of_usage_are_those_that_the_engine_tells():
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    told = as_response(read_answer(reply(usage=usage), config(), tokens=False), {}, config())["usage"]
    assert (told["input_tokens"], told["output_tokens"], told["total_tokens"]) == (3, 4, 8)
    assert told["input_tokens_details"] == {"cached_tokens": 2}
    assert told["output_tokens_details"] == {"reasoning_tokens": None}


texts = st.text(alphabet="ab<>/think\n ", max_size=30)


@given(texts, st.none() | st.text(alphabet="xy ", min_size=1, max_size=9), st.integers(0, 2))
def test_echoed_items_fold_back_to_the_message_with_its_tokens(text: str, thought: str | None, calls: int):
    content = (f"<think>{thought}</think>" if thought else "") + text.replace("</think>", "")
    message: dict[str, Any] = {"content": content}
    if calls:
        function = {"name": "f", "arguments": "{}"}
        message["tool_calls"] = [{"id": str(n), "type": "function", "function": function} for n in range(calls)]
    answer = read_answer(reply(message | TOKENS), config(), tokens=True)
    (folded,) = chat_messages(as_response(answer, {}, config())["output"])
    expected = {"role": "assistant", **message, **TOKENS}
    assert folded == expected | {"content": content or None}
