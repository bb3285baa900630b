"""A model server as the policy of one rollout."""

import json

import pytest

from roundhouse.config.models import Sampling
from roundhouse.generation.protocol import (
    BadReply,
    ContextOverflow,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from roundhouse.plugins.nemo_gym.clients.model import UNLIMITED_TOKENS, ModelServerClient
from roundhouse.plugins.nemo_gym.servers.endpoints import rollout_id
from roundhouse.plugins.programs.model_server.rollout_paths import path_prefix
from roundhouse.retry import Backoff
from tests.gym.playground import by_turn, calls, says
from tests.plugins.nemo_gym.models import serving_model
from tests.ports import free_port

UNLIMITED = Sampling(max_new_tokens=UNLIMITED_TOKENS)
QUESTION = {"role": "user", "content": "Add."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ROUTES = pytest.mark.parametrize("route", ["chat", "responses"])


@pytest.fixture
def fast_pauses(monkeypatch):
    monkeypatch.setattr("roundhouse.plugins.nemo_gym.clients.model.PAUSES", Backoff(0.01))


async def ask(
    url, route="chat", params=None, messages=(QUESTION,), tools=(), sampling=UNLIMITED, prefix="", cookies=None
):
    server = ModelServerClient(url, route, call_seconds=5)
    try:
        policy = server.rollout(params or {}, prefix=prefix, cookies=cookies)
        return await policy.complete(list(messages), list(tools), sampling, 7)
    finally:
        await server.close()


@ROUTES
async def test_a_reply_comes_with_its_text_its_calls_and_its_tokens(route):
    with serving_model(by_turn(calls(("add", {"n": 1}), ("add", {"n": 2})))) as (_, url):
        completion = await ask(url, route, tools=TOOLS)
    assert [call["function"]["name"] for call in completion.message["tool_calls"]] == ["add", "add"]
    assert json.loads(completion.message["tool_calls"][1]["function"]["arguments"]) == {"n": 2}
    assert len(completion.generation_token_ids) == len(completion.generation_log_probs) > 0
    assert completion.prompt_token_ids
    assert "generation_token_ids" not in completion.message


@ROUTES
async def test_thinking_comes_back_in_the_text_as_the_template_needs_it(route):
    with serving_model(by_turn(says("<think>hm</think>Done."))) as (_, url):
        assert (await ask(url, route)).message["content"] == "<think>hm</think>Done."


@ROUTES
async def test_only_what_the_row_names_is_sent(route):
    with serving_model(by_turn(says("Done."))) as (server, url):
        await ask(url, route)
        params = {"input": "x", "tools": [], "temperature": 0.5, "metadata": {"extra_body": "{}"}, "top_p": None}
        await ask(url, route, params, tools=TOOLS, sampling=Sampling(max_new_tokens=9))
    plain, asked = server.bodies
    assert plain.keys() <= {"model", "messages", "input"}
    assert (asked["temperature"], asked["metadata"]) == (0.5, {"extra_body": "{}"})
    assert "top_p" not in asked
    assert asked["max_tokens" if route == "chat" else "max_output_tokens"] == 9
    tool = asked["tools"][0]
    assert (tool["function"] if route == "chat" else tool)["name"] == "add"


@ROUTES
async def test_tokens_of_the_newest_reply_alone_travel_back(route):
    def reply(text, ids):
        tokens = {"prompt_token_ids": [1], "generation_token_ids": ids, "generation_log_probs": [-0.1] * len(ids)}
        return {"role": "assistant", "content": text, **tokens}

    messages = [QUESTION, reply("one", [2]), QUESTION, reply("two", [3, 4]), QUESTION]
    with serving_model(by_turn(says("Done."))) as (server, url):
        await ask(url, route, messages=messages)
    sent = server.bodies[0]["messages" if route == "chat" else "input"]
    carried = [item["generation_token_ids"] for item in sent if item.get("generation_token_ids")]
    assert carried == [[3, 4]]


async def test_cookies_of_a_rollout_go_with_each_of_its_calls():
    with serving_model(by_turn(says("Done."))) as (server, url):
        model = ModelServerClient(url)
        first, second = model.rollout({}), model.rollout({})
        for policy in (first, second, first):
            await policy.complete([QUESTION], [], UNLIMITED, 0)
        await model.close()
    assert server.cookies == [{}, {}, {"model": "1"}]


@pytest.mark.parametrize(
    ("capture", "path"),
    [
        (False, "/ng-rollout/3-1/v1/chat/completions"),
        (True, "/ng-rollout/3-1/training-token-capture/v1/chat/completions"),
    ],
)
async def test_calls_are_filed_under_the_rollouts_name(capture, path):
    name = rollout_id({"_ng_task_index": 3, "_ng_rollout_index": 1})
    with serving_model(by_turn(says("Done."))) as (server, url):
        await ask(url, prefix=path_prefix(name, capture=capture))
    assert server.paths == [path]


def test_a_rollouts_name_is_the_one_that_the_collector_looks_for():
    assert rollout_id({"_ng_rollout_id": "abc", "_ng_task_index": 1, "_ng_rollout_index": 2}) == "abc"
    assert rollout_id({"_ng_task_index": 1, "_ng_rollout_index": 2, "_ng_attempt_index": 1}) == "1-2-a1"
    assert rollout_id({"_ng_task_index": 1}) is None
    assert path_prefix(None, capture=True) == ""


@ROUTES
async def test_a_server_without_tokens_gives_a_completion_without_tokens(route):
    with serving_model(by_turn(says("Done.")), tells_tokens=False) as (_, url):
        completion = await ask(url, route)
    assert completion.message["content"] == "Done."
    assert (completion.prompt_token_ids, completion.generation_token_ids) == ([], [])


@ROUTES
async def test_a_reply_that_was_cut_says_so(route):
    with serving_model(by_turn(says("Do", "length"))) as (_, url):
        assert (await ask(url, route)).finish_reason == "length"


@ROUTES
async def test_an_empty_incomplete_reply_means_that_the_conversation_is_too_long(route):
    empty_chat = {"choices": [{"finish_reason": "length", "message": {"content": None}}], "usage": None}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
    empty = {"output": [message], "incomplete_details": {"reason": "max_output_tokens"}, "usage": None}
    body = json.dumps(empty_chat if route == "chat" else empty)
    with serving_model(by_turn(says("x")), failures=[(200, body)]) as (_, url), pytest.raises(ContextOverflow):
        await ask(url, route)


@pytest.mark.usefixtures("fast_pauses")
async def test_a_busy_server_is_asked_again_and_only_a_few_times():
    with serving_model(by_turn(says("Done.")), failures=[(503, "busy"), (429, "slow down")]) as (server, url):
        assert (await ask(url)).message["content"] == "Done."
        assert len(server.bodies) == 3
    with serving_model(by_turn(says("Done.")), failures=[(503, "busy")] * 9) as (server, url):
        with pytest.raises(EngineUnreachable, match="busy"):
            await ask(url)
        assert len(server.bodies) == 3
    # A model server passes an engine's own failure on as 502.
    with serving_model(by_turn(says("Done.")), failures=[(502, "the engine answered 500")] * 9) as (server, url):
        with pytest.raises(EngineFailed, match="answered 502: the engine answered 500"):
            await ask(url)
        assert len(server.bodies) == 3


@pytest.mark.usefixtures("fast_pauses")
@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (422, '{"detail":[]}', EngineRejected),
        (500, '"repr"', EngineFailed),
        (200, "no json", BadReply),
        (200, "[]", BadReply),
        (200, '{"choices":[]}', BadReply),
    ],
)
async def test_what_is_no_reply_is_a_typed_error_with_the_servers_words(status, body, error):
    with serving_model(by_turn(says("Done.")), failures=[(status, body)]) as (server, url):
        with pytest.raises(error) as caught:
            await ask(url)
        assert len(server.bodies) == 1
    assert body.strip('"') in str(caught.value)


async def test_a_server_that_runs_tools_itself_is_not_mistaken_for_a_model():
    output = [{"type": "function_call_output", "call_id": "c", "output": "3"}]
    answers = [(200, json.dumps({"output": output}))]
    with (
        serving_model(by_turn(says("x")), failures=answers) as (_, url),
        pytest.raises(EngineRejected, match="runs tools"),
    ):
        await ask(url, "responses")


@pytest.mark.usefixtures("fast_pauses")
async def test_a_server_that_is_not_there_and_one_that_never_answers_end_in_time():
    with pytest.raises(EngineUnreachable):
        await ask(f"http://127.0.0.1:{free_port()}")

    with serving_model(by_turn(says("Done.")), seconds=2) as (_, url):
        model = ModelServerClient(url, call_seconds=0.2)
        with pytest.raises(EngineTimeout):
            await model.rollout({}).complete([QUESTION], [], UNLIMITED, 0)
        await model.close()
