"""Only calls after the thought count, a broken call is reported, and every engine reads a reply alike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.environments.base import invalid_arguments
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import Generated, read_request
from roundhouse.generation.serve_app import make_tool_parser, with_chosen_parser
from roundhouse.generation.tool_calls import MAX_CALLS, THOUGHTS, bounded, parse_hermes, thought_end, tool_call
from roundhouse.generation.tool_formats import parse_harmony, parser_of_template
from tests.generation import tiny
from tests.generation.chat_templates import FORMATS, GPT_OSS, Format

NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
DELETE = '<tool_call>\n{"name": "delete", "arguments": {}}\n</tool_call>'
ZONE = '<tool_call>\n{"name": "now", "arguments": {"zone": }}\n</tool_call>'


def read(text: str) -> list[tuple[str, str]]:
    _, calls = parse_hermes(text, [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(
    "text",
    [
        f"<think>Shall I write {DELETE}? No.</think>\n{NOW}",
        f"<think>I must write the <tool_call> tag.</think>\n{NOW}",
        f"Shall I write {DELETE}? No.</think>\n{NOW}",
        f"<think>a <think>b</think> {DELETE}</think> {NOW}",
        f"<think>a</think>{NOW}<think>or {DELETE}?</think>",
        f"I use the <tool_call> tag. {NOW}",
        NOW.removesuffix("</tool_call>"),
    ],
    ids=["draft", "mention", "opened by the prompt", "nested", "second thought", "mention after it", "unclosed call"],
)
def test_only_calls_after_the_thought_count(text: str) -> None:
    assert read(text) == [("now", "{}")]


@pytest.mark.parametrize("text", [f"<think>Perhaps {NOW}", f"{NOW} or not</think> No.", "Write <tool_call> first."])
def test_a_reply_without_a_call_after_its_thought_stays_text(text: str) -> None:
    assert parse_hermes(text, []) == (text, [])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "now"}', {}),
        ('{"name": "now", "arguments": null}', {}),
        ('{"name": "now", "parameters": {"zone": 1}}', {"zone": 1}),
        ('{"name": "now", "arguments": {"a": "</tool_call><think></think>"}}', {"a": "</tool_call><think></think>"}),
    ],
    ids=["bare", "null", "parameters", "tags in a string"],
)
def test_arguments_may_be_missing_named_parameters_or_hold_tags(call: str, arguments: dict) -> None:
    [(name, written)] = read(f"<tool_call>{call}</tool_call>")
    assert (name, json.loads(written)) == ("now", arguments)


@pytest.mark.parametrize(
    ("broken", "name", "problem"),
    [
        (ZONE, "now", "Expecting value"),
        ('<tool_call>{"name": "now", "arguments": {},}</tool_call>', "now", "property name"),
        ('<tool_call>{"name": "now"}}</tool_call>', "now", "Extra data"),
        ('<tool_call>{"arguments": {}}</tool_call>', "invalid_tool_call", "a call is"),
        ("<tool_call>now()</tool_call>", "invalid_tool_call", "Expecting value"),
        ('<tool_call>{"name": ["now"], "arguments": {}}</tool_call>', "invalid_tool_call", "a call is"),
        ('<tool_call>{"name": "now", "arguments": {"x": "\\ud83d"}}</tool_call>', "now", "a call is"),
        ("<tool_call>" + '{"a":' * 4000 + "</tool_call>", "invalid_tool_call", "recursion"),
    ],
    ids=["value", "comma", "brace", "nameless", "no JSON", "name as a list", "surrogate", "depth"],
)
def test_a_broken_call_is_reported_while_the_good_ones_run(broken: str, name: str, problem: str) -> None:
    for text, place in ((NOW + broken, 1), (broken + NOW, 0)):
        calls = read(text)
        assert calls[1 - place] == ("now", "{}")
        assert calls[place][0] == name
        with pytest.raises(ValueError, match="Expecting value") as caught:
            json.loads(calls[place][1])  # so no agent runs it
        assert problem in json.loads(invalid_arguments(calls[place][1], caught.value).text)["error"]


def test_a_reply_has_a_bounded_number_of_calls_and_the_rest_is_reported() -> None:
    calls = read(NOW * 200)
    assert calls[:-1] == [("now", "{}")] * MAX_CALLS
    assert "may hold 64 tool calls" in invalid_arguments(calls[-1][1], ValueError()).text
    others = bounded([tool_call("now", "{}") for _ in range(200)])  # of another parser
    assert len(others) == MAX_CALLS + 1
    assert "may hold 64 tool calls" in invalid_arguments(others[-1]["function"]["arguments"], ValueError()).text


@pytest.mark.parametrize("backend", ["transformers", "vllm", "openai"])
def test_every_engine_reads_calls_with_one_parser(backend: str) -> None:
    endpoint = {"url": "http://127.0.0.1:9", "model": "policy"} if backend == "openai" else None
    config = GenerationConfig.model_validate({"backend": backend, "endpoint": endpoint})
    hermes, harmony = (SimpleNamespace(chat_template=template) for template in (tiny.CHAT_TEMPLATE, GPT_OSS))
    assert make_tool_parser(with_chosen_parser(config, hermes), hermes) is parse_hermes
    assert make_tool_parser(with_chosen_parser(config, harmony), harmony) is parse_harmony


@pytest.mark.parametrize("family", [each for each in FORMATS if each.call], ids=lambda family: family.name)
def test_the_parser_is_chosen_by_the_template(family: Format) -> None:
    assert parser_of_template(family.template) == family.parser


@pytest.mark.real
@pytest.mark.parametrize("family", [each for each in FORMATS if each.call], ids=lambda family: family.name)
def test_the_chosen_parser_reads_the_calls_of_its_family(family: Format, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    codec = ChatCodec(str(family.save(tmp_path)), 4096)
    config = with_chosen_parser(GenerationConfig(), codec.tokenizer)
    codec.parse_tool_calls = make_tool_parser(config, codec.tokenizer)
    ids = codec.encode(family.call)
    message, finish = codec.message(Generated(ids, [0.0] * len(ids), "stop"), [tiny.ADD_TOOL])
    if family.unread:
        assert finish == "stop"
        return
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
    assert finish == "tool_calls"


@pytest.mark.parametrize(("start", "end"), THOUGHTS)
def test_the_text_after_the_thought_begins_after_its_last_end(start: str, end: str) -> None:
    assert thought_end("text") == 0
    assert thought_end(f"{start}a{end}b") == len(f"{start}a{end}")
    assert thought_end(f"a{end}b") == len(f"a{end}")
    assert thought_end(f"{start}a{end}b{start}c") == len(f"{start}a{end}b{start}c")


HARMONY_CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<|channel|>final<|message|>It is 5.", "It is 5.", []),
        ("<|channel|>analysis<|message|>2+3<|end|><|start|>assistant<|channel|>final<|message|>5", "<think>2+3</think>5", []),
        ("<|channel|>analysis<|message|>Shall I " + DELETE, f"<think>Shall I {DELETE}</think>", []),
        (f'{HARMONY_CALL}{{"a": 2}}', None, [("add", '{"a": 2}')]),
        (f'<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{HARMONY_CALL}{{"a": 2}}', "I add.",
         [("add", '{"a": 2}')]),
        (f"{HARMONY_CALL}{{a}}", None, [("add", "<tool_call>{a}")]),
        ("plain", "plain", []),
    ],
    ids=["final", "thought", "draft", "call", "preamble", "broken call", "without channels"],
)  # fmt: skip
def test_a_harmony_reply_has_thoughts_text_and_calls(text: str, content: str | None, calls: list[Any]) -> None:
    read_content, read_calls = parse_harmony(text, [])
    assert read_content == content
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in read_calls] == calls


@pytest.mark.real
def test_vllms_other_parsers_see_the_text_after_the_thought() -> None:
    pytest.importorskip("vllm")
    tokenizer = type(
        "Tokenizer", (), {"get_vocab": lambda self: {"<|python_tag|>": 1}, "encode": lambda *_, **__: [1]}
    )()
    parse = make_tool_parser(GenerationConfig(tool_call_parser="llama3_json"), tokenizer)
    delete, now = (json.dumps({"name": name, "parameters": {}}) for name in ("delete", "now"))
    content, calls = parse(f"<think>{delete}?</think>{now}", [])
    assert [call["function"]["name"] for call in calls] == ["now"]
    assert content == f"<think>{delete}?</think>"
    assert parse(f"<think>{delete}", []) == (f"<think>{delete}", [])


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory: Path = tmp_path_factory.mktemp("model")
    tiny.make_tokenizer(directory)
    (directory / "config.json").write_text('{"vocab_size": 512}')
    return ChatCodec(str(directory), 512)


def answer(codec: ChatCodec, text: str, finish: str = "stop", prompt: str = "") -> tuple[dict, str]:
    ids = codec.encode(text)
    generated = Generated(ids, [-0.1] * len(ids), finish)
    return codec.message(generated, [tiny.ADD_TOOL], prompt_token_ids=codec.encode(prompt))


def test_a_thought_that_the_generation_prompt_opened_holds_drafts(codec: ChatCodec) -> None:
    opening = "<|im_start|>assistant\n<think>\n"
    assert answer(codec, DELETE, prompt=opening) == ({"role": "assistant", "content": DELETE}, "stop")
    message, finish = answer(codec, f"{DELETE}?</think>{NOW}", prompt=opening)
    assert (message["content"], finish) == (f"{DELETE}?</think>", "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


def test_a_call_that_the_token_limit_cut_stays_text(codec: ChatCodec) -> None:
    text = NOW + '<tool_call>{"name": "no'
    assert answer(codec, text, "length") == ({"role": "assistant", "content": text}, "length")
    assert answer(codec, NOW, "length")[1] == "tool_calls"


def test_a_conversation_with_a_broken_call_continues_its_tokens(codec: ChatCodec) -> None:
    codec.tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace(
        "call.function.arguments if call.function.arguments is string",
        "'' if call.function.arguments.items() is string",
    )
    prompt = codec.prompt(read_request({"messages": tiny.TOOL_MESSAGES, "tools": [tiny.ADD_TOOL]}, "policy")).token_ids
    drawn = codec.encode(ZONE + "<|im_end|>")
    message, _ = answer(codec, ZONE)
    message |= {"prompt_token_ids": prompt, "generation_token_ids": drawn, "generation_log_probs": [-0.1] * len(drawn)}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Expecting value"}
    following = read_request({"messages": [*tiny.TOOL_MESSAGES, message, result], "tools": [tiny.ADD_TOOL]}, "policy")
    tokens = codec.prompt(following).token_ids
    assert tokens[: len(prompt) + len(drawn)] == prompt + drawn
    assert "Expecting value" in codec.tokenizer.decode(tokens[len(prompt) + len(drawn) :])
