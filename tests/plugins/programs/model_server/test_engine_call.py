"""Requests to an engine."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.generation.protocol import InvalidRequest, check_chat, check_responses
from roundhouse.plugins.programs.model_server.engine_call import (
    chat_from_responses,
    ends_in_reasoning_only,
    engine_body,
    tokenize_body,
    with_recorded_tokens,
)
from roundhouse.plugins.programs.model_server.section import ModelServerConfig

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": None}


def config(**fields: Any) -> ModelServerConfig:
    return ModelServerConfig(base_url=["http://e"], **fields)


def asked(chat: dict[str, Any], tokens: bool = True, **fields: Any) -> dict[str, Any]:
    return engine_body({"messages": [{"role": "user", "content": "hi"}]} | chat, config(**fields), tokens=tokens)


def test_responses_parameters_take_their_chat_names_and_nothing_is_sent_that_was_not_asked():
    chat = chat_from_responses(
        {
            "input": "hi",
            "max_output_tokens": 5,
            "reasoning": {"effort": "low"},
            "tools": [TOOL],
            "top_p": None,
            "store": False,
        }
    )
    assert chat == {
        "messages": [{"role": "user", "content": "hi"}],
        "store": False,
        "max_tokens": 5,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
    }


def test_without_tools_there_is_no_tool_choice():
    chat = chat_from_responses({"input": "hi", "tool_choice": "auto", "parallel_tool_calls": True, "tools": []})
    assert chat == {"messages": [{"role": "user", "content": "hi"}]}


def test_a_named_tool_choice_takes_its_chat_shape():
    chat = chat_from_responses({"input": "hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}})
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}


def test_sampling_overrides_beat_the_caller_who_beats_the_metadata_who_beats_the_configuration():
    body = asked(
        {
            "temperature": 0.1,
            "seed": 1,
            "metadata": {"extra_body": json.dumps({"seed": 2, "top_k": 2, "min_p": 0.5})},
        },
        extra_body={"top_k": 3, "repetition_penalty": 1.5},
        sampling_overrides={"temperature": 1.0},
    )
    assert (body["temperature"], body["seed"], body["top_k"], body["min_p"]) == (1.0, 1, 2, 0.5)
    assert body["repetition_penalty"] == 1.5


def test_template_arguments_of_the_request_beat_those_of_the_configuration_and_the_metadata_goes_on_as_it_is():
    metadata = {"chat_template_kwargs": '{"enable_thinking": false}', "note": "x"}
    body = asked({"metadata": metadata}, chat_template_kwargs={"enable_thinking": True, "style": "a"})
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "style": "a"}
    assert body["metadata"] == metadata


@pytest.mark.parametrize("value", ["{", "[1]"])
def test_metadata_that_is_no_json_object_is_refused(value: str):
    with pytest.raises(InvalidRequest, match="extra_body"):
        asked({"metadata": {"extra_body": value}})


def test_token_ids_are_asked_for_with_zero_further_log_probabilities():
    body = asked({"top_logprobs": None, "logprobs": False})
    assert (body["logprobs"], body["top_logprobs"], body["return_tokens_as_token_ids"]) == (True, 0, True)
    assert "return_token_ids" not in body
    assert asked({}, request_prompt_and_generation_token_ids=True)["return_token_ids"] is True
    plain = asked({"top_logprobs": None}, tokens=False)
    assert plain.keys() == {"model", "messages"}


def test_several_choices_are_refused():
    with pytest.raises(InvalidRequest, match="one choice"):
        asked({}, sampling_overrides={"n": 2})


def test_only_the_newest_recorded_tokens_travel():
    turns = [{"role": "assistant", "content": str(place), **TOKENS, "routed_experts": "x"} for place in range(3)]
    sent = asked({"messages": [*turns, {"role": "user", "content": "?"}]})["messages"]
    assert [sorted(message) for message in sent[:2]] == [["content", "role"]] * 2
    assert sent[2] == turns[2]
    assert all(not TOKENS.keys() & message.keys() for message in asked({"messages": turns}, tokens=False)["messages"])


def test_think_blocks_leave_the_history_for_fields_of_their_own():
    message = {"role": "assistant", "content": "<think>a</think>b<think>c</think>"}
    sent = asked({"messages": [message]})["messages"][0]
    assert sent == {"role": "assistant", "content": "b", "reasoning_content": "a", "reasoning": "a"}
    assert asked({"messages": [message]}, uses_interleaved_reasoning=False)["messages"] == [
        {"role": "assistant", "content": "b"}
    ]
    for kept in ({"uses_reasoning_parser": False}, {"preserve_reasoning_in_assistant_content": True}):
        assert asked({"messages": [message]}, **kept)["messages"] == [message]
    parts = [{"type": "text", "text": "<think>a</think>b"}]
    listed = asked({"messages": [{"role": "assistant", "content": parts}]})["messages"][0]
    assert (listed["content"], listed["reasoning"]) == ([{"type": "text", "text": "b"}], "a")


def test_developer_messages_become_system_messages_where_configured():
    chat = {"messages": [{"role": "developer", "content": "d"}]}
    assert asked(chat)["messages"][0]["role"] == "developer"
    assert asked(chat, replace_developer_role_with_system=True)["messages"][0]["role"] == "system"


def test_a_turn_of_reasoning_only_is_told_apart():
    reasoning = {"role": "assistant", "content": "<think>a</think>"}
    assert ends_in_reasoning_only(asked({"messages": [reasoning]}))
    assert not ends_in_reasoning_only(asked({"messages": [reasoning | {"tool_calls": [{}]}]}))
    assert not ends_in_reasoning_only(asked({}))


def test_audio_of_the_metadata_stands_before_the_newest_users_text_and_files_are_not_read():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    body = asked({"messages": messages, "metadata": {"audio_data": "data:audio/wav;base64,AA"}})
    assert body["messages"][1]["content"] == [
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA"}},
        {"type": "text", "text": "b"},
    ]
    assert "metadata" not in body
    with pytest.raises(InvalidRequest, match="files"):
        asked({"metadata": {"audio_path": "/etc/passwd"}})


def test_tokenize_is_asked_with_what_decides_the_prompt():
    body = asked({"temperature": 1.0, "tools": [1]}, extra_body={"required_prefix_token_ids": [1]})
    assert tokenize_body(body).keys() == {"model", "messages", "tools", "required_prefix_token_ids"}


def test_the_callers_objects_are_left_as_they_were():
    messages = [{"role": "developer", "content": "d"}, {"role": "assistant", "content": "<think>a</think>b", **TOKENS}]
    chat = {"messages": messages, "metadata": {"audio_data": "x"}}
    before = json.loads(json.dumps(chat))
    engine_body(chat, config(replace_developer_role_with_system=True), tokens=False)
    assert chat == before


# -- checks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "loc"),
    [
        ({"input": "x", "top_k": 5}, "extra_forbidden", ["body", "top_k"]),
        ({}, "missing", ["body", "input"]),
        ({"input": None}, "list_type", ["body", "input"]),
        ({"input": "x", "temperature": "hot"}, "float_type", ["body", "temperature"]),
        ({"input": "x", "max_output_tokens": True}, "int_type", ["body", "max_output_tokens"]),
        ({"input": "x", "tools": None}, "list_type", ["body", "tools"]),
        ({"input": ["x"]}, "dict_type", ["body", "input", 0]),
        ({"input": "x", "tools": ["x"]}, "dict_type", ["body", "tools", 0]),
        ({"input": "x", "tool_choice": "required"}, "value_error", ["body", "tool_choice"]),
        ({"input": "x", "previous_response_id": "resp_1"}, "value_error", ["body", "previous_response_id"]),
        ({"input": [{"role": "assistant", "prompt_token_ids": [1]}]}, "value_error", ["body", "input", 0]),
        ({"input": [{"role": "assistant", **TOKENS, "generation_log_probs": []}]}, "value_error", ["body", "input", 0]),
        ([], "dict_type", ["body"]),
    ],
)
def test_what_the_responses_dialect_does_not_know_is_refused_in_fastapis_shape(body: Any, kind: str, loc: list[Any]):
    with pytest.raises(InvalidRequest) as caught:
        check_responses(body)
    (problem,) = caught.value.problems
    assert (problem["type"], problem["loc"]) == (kind, loc)
    assert problem.keys() == {"type", "loc", "msg", "input", "url"}


def test_null_stands_for_a_field_that_was_not_given():
    body = {"input": "x", "temperature": None, "metadata": None, "stream": None}
    assert check_responses(body) is body


def test_unknown_chat_fields_are_ignored():
    messages = [{"role": "user", "content": "x"}]
    assert check_chat({"messages": messages, "top_k": 5, "return_token_ids": True}) == {"messages": messages}
    said = {"role": "assistant"}
    for wrong in (
        {},
        {"messages": "x"},
        {"messages": [{}]},
        {"messages": [said | {"content": 5}]},
        {"messages": [said | {"content": [{"text": 5}]}]},
        {"messages": [said | {"tool_calls": {}}]},
        {"messages": [said | {"tool_calls": [{"id": "c"}]}]},
    ):
        with pytest.raises(InvalidRequest):
            check_chat(wrong)


@pytest.mark.parametrize("items", [[{"type": "web_search_call"}], [{"type": "function_call"}], [{"content": "x"}]])
def test_items_without_a_form_in_chat_are_refused(items: list[Any]):
    with pytest.raises(InvalidRequest):
        chat_from_responses({"input": items})


ON_THE_WIRE = st.integers(-(2**63), 2**64 - 1)  # the parser reads larger ones as floats
json_values = st.recursive(
    st.none() | st.booleans() | ON_THE_WIRE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


CHAT_PARTS = {"content": json_values, "tool_calls": json_values, "tool_call_id": json_values}


@given(
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(["assistant", "user"])}, optional=CHAT_PARTS), max_size=3)
)
def test_any_chat_messages_are_either_understood_or_refused(messages: list[dict[str, Any]]):
    with contextlib.suppress(InvalidRequest):
        chat = check_chat({"messages": messages})
        assert len(engine_body(chat, config(), tokens=True)["messages"]) == len(messages)
        assert with_recorded_tokens(chat, lambda digest: None) == chat


@given(st.dictionaries(st.sampled_from(["input", "tools", "metadata", "instructions", "reasoning", "x"]), json_values))
def test_any_json_is_either_understood_or_refused(body: dict[str, Any]):
    with contextlib.suppress(InvalidRequest):
        chat = chat_from_responses(check_responses(body))
        assert engine_body(chat, config(), tokens=True)["messages"] is not None
