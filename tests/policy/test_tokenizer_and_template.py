"""The tokenizer and chat template of the policies made here, on demonstrations of all environments."""

import copy
import functools
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.environments import Calculator, Sort
from roundhouse.environments.base import Environment
from roundhouse.environments.calculator import ArithmeticChain
from roundhouse.policy.tokenizer import MARKUP_TOKENS, SPECIAL_TOKENS, blank_tokenizer, render, train_tokenizer
from roundhouse.rollout.responses import chat_tools

ENVIRONMENTS = [Calculator(), Sort(digits=4), ArithmeticChain(problems=400)]


@functools.cache
def trained(environment: Environment):
    return make_tokenizer(environment)


def make_tokenizer(environment: Environment):
    tools = chat_tools(environment.tool_schemas())
    demonstrations = environment.demonstrations("train", 1000, 0.25, seed=0)
    return train_tokenizer([render(blank_tokenizer(), shown, tools) for shown in demonstrations])


@pytest.fixture(scope="module")
def tokenizer():
    return trained(ENVIRONMENTS[0])


def test_rendering_only_ever_appends_in_400_of_400_conversations(tokenizer) -> None:
    """At each assistant turn: whole text == text of the prompt + generated text + the rest, and so do the tokens."""
    exact = 0
    for seed in range(400):
        environment = ENVIRONMENTS[seed % 3]
        tools = chat_tools(environment.tool_schemas())
        (conversation,) = environment.demonstrations("train", 1, 0.7, seed)
        whole = tokenizer(render(tokenizer, conversation, tools))["input_ids"]
        ids: list[int] = []
        for turn, said in enumerate(conversation):
            if said["role"] != "assistant":
                continue
            prompt = tokenizer(render(tokenizer, conversation[:turn], tools, add_generation_prompt=True))["input_ids"]
            assert prompt[: len(ids)] == ids
            after = tokenizer(render(tokenizer, conversation[: turn + 1], tools))["input_ids"]
            generated = after[len(prompt) : after.index(tokenizer.eos_token_id, len(prompt)) + 1]
            ids = prompt + generated
        exact += ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]) == "\n"
    assert exact == 400


def test_arguments_render_the_same_as_text_and_as_object(tokenizer) -> None:
    """An OpenAI client sends arguments as a JSON text; vLLM parses them before it applies the template."""
    tools = chat_tools(ENVIRONMENTS[0].tool_schemas())
    (conversation,) = ENVIRONMENTS[0].demonstrations("train", 1, 1.0, 0)
    parsed = copy.deepcopy(conversation)
    for said in parsed:
        for call in said.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert render(tokenizer, parsed, tools) == render(tokenizer, conversation, tools)


def test_a_second_tool_result_and_a_system_message_append_too(tokenizer) -> None:
    tools = chat_tools(ENVIRONMENTS[0].tool_schemas())
    call = {"id": "a", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "1+1"}'}}
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Twice."},
        {"role": "assistant", "content": "Well. ", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    texts = [render(tokenizer, conversation[:length], tools) for length in range(2, 6)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert texts[-1].startswith("<|im_start|>system\nBe brief.\n<tools>\n")
    assert "Well. <tool_call>\n" in texts[-1]


def test_the_calculator_prompt_takes_21_tokens(tokenizer) -> None:
    row = ENVIRONMENTS[0].tasks("train")[0]["responses_create_params"]
    prompt = render(tokenizer, row["input"], chat_tools(row["tools"]), add_generation_prompt=True)
    assert len(tokenizer(prompt)["input_ids"]) == 21


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.name)
def test_numbers_to_99_are_one_token_the_same_wherever_they_stand(environment: Environment) -> None:
    tokenizer = trained(environment)
    for number in range(100):
        (alone,) = tokenizer(str(number))["input_ids"]
        for text in (
            f"{number}*",
            f"+{number}?",
            f" is {number}.",
            f'"{number}"',
            f"\n{number}\n",
            f"<tool_response>{number}",
        ):
            assert tokenizer(text)["input_ids"].count(alone) == 1, text


def test_markup_is_one_token_and_survives_decoding_while_turn_marks_do_not(tokenizer) -> None:
    for token in (*MARKUP_TOKENS, *SPECIAL_TOKENS):
        assert len(tokenizer(token)["input_ids"]) == 1
        added = tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids(token)]
        assert added.special == (token in SPECIAL_TOKENS)
    text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3*4"}}\n</tool_call>'
    ids = tokenizer(text + "<|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = trained(ENVIRONMENTS[2])
    plain = "".join(character for character in text if not 0xD800 <= ord(character) < 0xE000)
    assert tokenizer.decode(tokenizer(plain, split_special_tokens=True)["input_ids"]) == plain


def test_every_id_below_the_vocabulary_size_is_a_token(tokenizer) -> None:
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_same_texts_give_the_same_tokenizer() -> None:
    first, second = make_tokenizer(ENVIRONMENTS[0]), make_tokenizer(ENVIRONMENTS[0])
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


@pytest.mark.real
@pytest.mark.parametrize("environment", [ENVIRONMENTS[0], ENVIRONMENTS[2]], ids=lambda environment: environment.name)
def test_vllms_hermes_parser_finds_the_call_in_the_decoded_tokens(environment: Environment) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    tokenizer = trained(environment)
    tools = chat_tools(environment.tool_schemas())
    (conversation,) = environment.demonstrations("train", 1, 1.0, 1)
    prompt = tokenizer(render(tokenizer, conversation[:1], tools, add_generation_prompt=True))["input_ids"]
    after = tokenizer(render(tokenizer, conversation[:2], tools))["input_ids"]
    text = tokenizer.decode(after[len(prompt) :], skip_special_tokens=True).rstrip("\n")
    request = ChatCompletionRequest(model="policy", messages=conversation[:1], tools=tools)
    found = Hermes2ProToolParser(tokenizer).extract_tool_calls(text, request)
    assert found.tools_called
    assert found.content is None
    (call,) = found.tool_calls
    assert call.function.model_dump() == conversation[1]["tool_calls"][0]["function"]
