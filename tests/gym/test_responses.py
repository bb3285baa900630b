"""Responses items and chat messages."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.rollout.responses import (
    UnsupportedItem,
    assistant_items,
    chat_messages,
    chat_tools,
    items_from_chat,
    response_object,
    split_thinking,
    with_token_fields,
)
from tests.growth import growth

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


def call(name: str = "add", call_id: str = "c1", arguments: str = '{"n":3}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_reply_becomes_reasoning_text_and_calls_with_the_tokens_on_the_last():
    message = {"role": "assistant", "content": "<think>hm</think>ok", "tool_calls": [call(), call("mul", "c2")]}
    items = with_token_fields(assistant_items(message, "m"), TOKENS)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert items[1]["content"] == [{"type": "output_text", "text": "ok", "annotations": []}]
    assert (items[2]["id"], items[2]["call_id"], items[2]["arguments"]) == ("c1", "c1", '{"n":3}')
    assert [sorted(TOKENS.keys() & item.keys()) for item in items] == [[], [], [], sorted(TOKENS)]
    assert chat_messages(items) == [message | TOKENS]


def test_an_empty_reply_is_one_empty_message():
    (item,) = assistant_items({"role": "assistant", "content": None}, "m")
    assert item["content"][0]["text"] == ""


def test_a_think_block_that_never_closes_stays_text():
    (item,) = assistant_items({"role": "assistant", "content": "<think>hm"}, "m")
    assert item["content"][0]["text"] == "<think>hm"


text = st.text(alphabet=st.characters(exclude_characters="<"), min_size=1)
assistant = st.builds(
    lambda thought, content, calls, tokens: {
        "role": "assistant",
        "content": ((f"<think>{thought}</think>" if thought else "") + (content or "")) or None,
        **({"tool_calls": [call(call_id=f"c{index}") for index in range(calls)]} if calls else {}),
        **(TOKENS if tokens else {}),
    },
    st.none() | text,
    st.none() | text,
    st.integers(0, 3),
    st.booleans(),
)
other = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), st.text()),
    st.builds(lambda content: {"role": "tool", "tool_call_id": "c0", "content": content}, st.text()),
)


@given(st.lists(st.tuples(assistant, other)))
def test_chat_to_items_and_back_is_the_same_conversation(pairs: list[tuple[dict[str, Any], dict[str, Any]]]):
    messages = [message for pair in pairs for message in pair]
    assert chat_messages(items_from_chat(messages)) == messages


def test_images_of_a_chat_stay_beside_their_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD", "detail": "auto"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "how many?"}]}]
    assert chat_messages(items_from_chat(messages)) == messages


def test_a_string_is_a_user_message_and_instructions_join_the_system_messages():
    assert chat_messages("hi") == [{"role": "user", "content": "hi"}]
    given_items = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert chat_messages(given_items, "first") == [
        {"role": "system", "content": "first\n\na\n\nb"},
        {"role": "user", "content": "c"},
    ]
    assert chat_messages(given_items, developer_as_system=False)[1]["role"] == "developer"


def test_tool_outputs_and_chat_shaped_items_are_taken():
    items = [
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]
    assert chat_messages(items) == [
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "computer_call"},
        {"role": "judge", "content": "x"},
        {"role": "user", "content": [{"type": "input_image"}]},
    ],
)
def test_what_cannot_be_shown_as_text_is_refused(item: dict[str, Any]):
    with pytest.raises(UnsupportedItem):
        chat_messages([item])


def test_images_and_videos_pass_in_chat_shape_and_one_text_part_is_text():
    parts = [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
        {"type": "input_video", "video_url": {"url": "http://v"}},
    ]
    (message,) = chat_messages([{"role": "user", "content": parts}])
    assert message["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "video_url", "video_url": {"url": "http://v"}},
    ]
    assert chat_messages([{"role": "user", "content": parts[:1]}]) == [{"role": "user", "content": "look"}]


def test_think_blocks_stay_in_the_text_where_no_reasoning_is_told_apart():
    (item,) = assistant_items({"role": "assistant", "content": "<think>hm</think>ok"}, "msg_1", reasoning=False)
    assert item["content"][0]["text"] == "<think>hm</think>ok"


def test_the_token_fields_folded_last_win():
    items = [
        {"type": "reasoning", "summary": [], **TOKENS},
        {"type": "message", "role": "assistant", "content": "a", **TOKENS, "generation_token_ids": [4]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "prompt_token_ids": None},
    ]
    assert chat_messages(items)[0]["generation_token_ids"] == [4]


def test_only_function_tools_can_be_offered():
    with pytest.raises(UnsupportedItem):
        chat_tools([{"type": "web_search"}])


def test_tools_in_chat_shape_have_no_strict():
    tool = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}, "strict": True}
    function = {"name": "add", "description": "d", "parameters": {"type": "object"}}
    assert chat_tools([tool]) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_a_response_object_says_whether_it_is_complete(finish: str, status: str, details: Any):
    response = response_object(
        "resp_1",
        [],
        model="policy",
        created_at=1.0,
        finish_reason=finish,
        input_tokens=3,
        output_tokens=4,
        params={"input": "x", "tools": [1], "temperature": 0.5},
    )
    assert (response["object"], response["status"], response["incomplete_details"]) == ("response", status, details)
    assert response["usage"]["total_tokens"] == 7
    assert (response["tools"], response["temperature"], "input" in response) == ([1], 0.5, False)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "<"])).map("".join))
def test_thinking_is_what_lies_between_a_beginning_and_the_next_end(text: str):
    blocks = re.compile(r"<think>(.*?)</think>", re.DOTALL)
    assert split_thinking(text) == (blocks.findall(text), blocks.sub("", text))


def test_a_policy_that_repeats_the_beginning_of_a_block_does_not_stop_the_event_loop():
    """A reply of 16,000 tokens took 24 s, in which no other rollout of the process moved."""

    def split(count: int) -> None:
        assert split_thinking("<think>a</think>" + "<think>" * count) == (["a"], "<think>" * count)

    assert growth(split, 2000) < 24
