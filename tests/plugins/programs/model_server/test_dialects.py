"""Anthropic's dialect, the streaming dialect of Responses, and the replay of answers as events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.generation.protocol import InvalidRequest, check_responses
from roundhouse.plugins.programs.model_server import answer, sse
from roundhouse.plugins.programs.model_server.sse import strict_body, with_namespaces
from roundhouse.rollout.responses import assistant_items, chat_messages, response_object


def events(stream: bytes) -> list[dict[str, Any]]:
    lines = [line for line in stream.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def response(*output: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    return response_object("resp_1", list(output), model="m", created_at=1.0, finish_reason=finish, output_tokens=7)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n": 3}'}}
FULL = assistant_items({"content": "<think>hm</think>ok", "tool_calls": [CALL]}, "msg_1")


# -- Anthropic ------------------------------------------------------------------------------------------------------


def test_a_messages_request_is_the_same_conversation_in_responses():
    body = answer.responses_body(
        {
            "model": "claude",
            "max_tokens": 9,
            "temperature": 0.5,
            "system": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "and kind"}],
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
            "metadata": {"user_id": "u"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "ok"},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"n": 3}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": RESULT}]},
            ],
        }
    )
    assert check_responses(body) is body
    assert (body["model"], body["max_output_tokens"], body["temperature"]) == ("claude", 9, 0.5)
    assert (body["instructions"], body["tool_choice"]) == ("be brief\nand kind", "required")
    assert body["tools"][0]["name"] == "add"
    user, assistant, tool = chat_messages(body["input"])
    assert user["content"][1]["image_url"]["url"] == "data:image/png;base64,AA"
    assert assistant == {"role": "assistant", "content": "<think>hm</think>ok", "tool_calls": [CALL]}
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "4\n5"}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
RESULT = [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]},
        {"messages": [{"content": "x"}]},
        {"messages": [], "tool_choice": {"type": "often"}},
    ],
)
def test_what_responses_cannot_say_is_refused(body: dict[str, Any]):
    with pytest.raises(InvalidRequest):
        answer.responses_body(body)


def test_an_image_by_its_file_id_is_refused_with_the_remedy() -> None:
    image = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    with pytest.raises(InvalidRequest) as caught:
        answer.responses_body({"messages": [{"role": "user", "content": [image]}]})
    assert "source has type 'file', not base64 or url" in str(caught.value)


def test_a_response_is_a_message_with_thinking_text_and_tool_use():
    message = answer.message_object(response(*FULL), "claude")
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2] == {"type": "tool_use", "id": "c1", "name": "add", "input": {"n": 3}}
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("tool_use", 7)
    text = FULL[1]
    for finish, reason in (("stop", "end_turn"), ("length", "max_tokens"), ("content_filter", "refusal")):
        assert answer.message_object(response(text, finish=finish), "m")["stop_reason"] == reason


def test_arguments_that_are_no_object_reach_the_agent_as_such():
    call = {**CALL, "function": {"name": "add", "arguments": "{n"}}
    (item,) = assistant_items({"content": None, "tool_calls": [call]}, "msg_1")
    assert answer.message_object(response(item), "m")["content"][0]["input"] == {"invalid_arguments": "{n"}


def test_messages_events_add_up_to_the_message():
    message = answer.message_object(response(*FULL), "m")
    told = events(sse.messages_events(message))
    assert [event["type"] for event in told] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["thinking_delta", "text_delta", "input_json_delta"]
    assert (deltas[0]["thinking"], deltas[1]["text"], json.loads(deltas[2]["partial_json"])) == ("hm", "ok", {"n": 3})
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


# -- events of the other dialects -----------------------------------------------------------------------------------


def test_responses_events_add_up_to_the_response():
    told = response(*FULL)
    stream = events(sse.responses_events(told))
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert (stream[0]["type"], stream[0]["response"]["status"]) == ("response.created", "in_progress")
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == told["output"]
    assert stream[-1] == {"type": "response.completed", "response": told, "sequence_number": len(stream) - 1}
    assert [event["delta"] for event in stream if event["type"] == "response.output_text.delta"] == ["ok"]


def test_chat_chunks_add_up_to_the_message_and_end_with_done():
    completion = {
        "id": "1",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"content": "ok", "tool_calls": [CALL]}}],
        "usage": {"total_tokens": 3},
    }
    stream = sse.chat_chunks(completion, include_usage=True)
    assert stream.endswith(b"data: [DONE]\n\n")
    deltas = [event["choices"][0]["delta"] for event in events(stream)[:-1]]
    assert deltas == [{"role": "assistant"}, {"content": "ok"}, {"tool_calls": [{"index": 0, **CALL}]}, {}]
    assert events(stream)[-1]["usage"] == {"total_tokens": 3}
    assert events(sse.chat_chunks(completion, include_usage=False))[-1]["choices"][0]["finish_reason"] == "tool_calls"


# -- the streaming dialect ------------------------------------------------------------------------------------------


def test_a_coding_agents_request_becomes_strict():
    body, namespaces = strict_body(
        {
            "stream": True,
            "client_metadata": {"x": 1},
            "prompt_cache_key": "k",
            "instructions": "first",
            "tools": [{"type": "namespace", "name": "fs", "tools": [{"name": "read"}]}, {"type": "web_search"}],
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "second"}]},
                {"type": "message", "role": "user", "content": "hi"},
                {"type": "additional_tools", "tools": [{"type": "function", "name": "add"}, {"type": "custom"}]},
                {"type": "ghost_snapshot"},
                {"type": "function_call", "call_id": "c", "namespace": "fs", "name": "read", "arguments": "{}"},
            ],
        }
    )
    assert check_responses(body) is body
    assert body["instructions"] == "first\n\nsecond"
    assert [tool["name"] for tool in body["tools"]] == ["fs__read", "add"]
    assert [item["type"] for item in body["input"]] == ["message", "function_call"]
    assert body["input"][1]["name"] == "fs__read"
    assert namespaces == {"fs__read": ("fs", "read")}


def test_calls_of_namespaced_tools_go_back_as_they_were_offered():
    item = {"type": "function_call", "call_id": "c", "name": "fs__read", "arguments": "{}"}
    told = with_namespaces(response(item, *FULL), {"fs__read": ("fs", "read")})
    assert (told["output"][0]["namespace"], told["output"][0]["name"]) == ("fs", "read")
    assert told["output"][1:] == FULL
    assert with_namespaces(told, {}) == told


@given(st.lists(st.sampled_from(["user", "assistant"]).map(lambda role: {"role": role, "content": "x"}), min_size=1))
def test_a_conversation_without_particularities_stays_as_it_is(items: list[dict[str, Any]]):
    body = {"input": items, "tools": [{"type": "function", "name": "add"}], "temperature": 0.5}
    assert strict_body(body | {"stream": True}) == (body, {})
