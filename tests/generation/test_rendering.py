"""A caller chooses variables of the template alone, and a slow rendering holds up nothing else."""

from __future__ import annotations

import asyncio
import threading
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.generation import chat_server
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.chat_server import ChatServer
from roundhouse.generation.protocol import BadRequest, read_request
from roundhouse.policy import existing, model_directory
from roundhouse.policy.model_directory import ChatTemplate, refuse_unfit_template
from roundhouse.policy.starting import starting_policy_of
from tests.generation import tiny
from tests.generation.test_control_tokens import codec_of

SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if mood == 'slow' %}" + SLOW + "{% endif %}{{ mood }}" + tiny.CHAT_TEMPLATE


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return codec_of(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)


def request(**arguments: Any) -> dict[str, Any]:
    return {"messages": tiny.TOOL_MESSAGES, "chat_template_kwargs": arguments}


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "return_dict", "eos_token", "raise_exception", "moo", "other"),
    ],
)
def test_an_argument_that_is_not_a_variable_of_the_template_is_refused(codec: ChatCodec, name: str) -> None:
    with pytest.raises(BadRequest, match=rf"{name} is given, and it is not a variable") as caught:
        codec.prompt(read_request(request(**{name: "x"}), "policy"))
    assert caught.value.parameter == "chat_template_kwargs"


def test_a_variable_of_the_template_is_taken(codec: ChatCodec) -> None:
    plain = codec.prompt(read_request(request(), "policy")).token_ids
    assert codec.prompt(read_request(request(mood="abc"), "policy")).token_ids == codec.encode("abc") + plain


async def ask(server: ChatServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """One exchange with the ASGI application."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": orjson.dumps(body), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await server({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    return sent[0]["status"], orjson.loads(sent[1]["body"])


async def test_a_slow_rendering_holds_up_no_other_request_and_is_ended(
    codec: ChatCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_server, "RENDER_SECONDS", 0.5)
    policy: Any = SimpleNamespace(status=lambda: {"ready": True})
    server = ChatServer(policy, codec, "policy")
    tool = {"message": {"role": "assistant", "content": "a"}, "tools": []}
    slow = [asyncio.create_task(ask(server, "POST", "/tokenize", request(mood="slow"))) for _ in range(3)]
    await asyncio.sleep(0)
    assert (await ask(server, "GET", "/rh/status"))[0] == 200
    assert (await ask(server, "POST", "/rh/parsed", tool))[0] == 200
    assert not any(task.done() for task in slow)
    for status, reply in await asyncio.gather(*slow):
        assert (status, reply["error"]["param"]) == (400, "messages")
        assert "did not render these messages within 0.5 s" in reply["error"]["message"]
    for thread in threading.enumerate():
        if thread.name == "rendering":
            thread.join(30)
            assert not thread.is_alive()


def test_a_template_that_does_not_end_is_refused_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_directory, "RENDER_SECONDS", 0.3)
    with pytest.raises(ConfigError, match=r"does not render within 0\.3 s\. Bound its loops"):
        refuse_unfit_template(ChatTemplate("model", SLOW), [])


def test_a_template_writes_the_day_that_the_run_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = codec_of(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}" + tiny.CHAT_TEMPLATE)
    pinned = ChatCodec(str(tmp_path), 512, template_date=date(2020, 2, 3))
    plain, other = (each.prompt(read_request(request(), "policy")).token_ids for each in (made, pinned))
    assert pinned.tokenizer.decode(other).startswith("03 Feb 2020")
    assert plain != other
    for day, reports in ((None, 1), ("2020-02-03", 0)):
        caplog.clear()
        tree = {"run_id": "r", "environment": {"kind": "sort"}, "generation": {"template_date": day}}
        config = parse_config(tree | {"policy": {"kind": "pretrained", "path": str(tmp_path)}})
        monkeypatch.setattr(existing, "check_model_directory", lambda path, length: None)
        starting_policy_of(config).prompts([], None, remote=False)
        assert caplog.text.count("Set generation.template_date to keep one day") == reports
