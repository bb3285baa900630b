"""Before a run relies on an engine it asks it as a rollout does; what would spoil rollouts is named with its remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from roundhouse.config.loading import parse_config
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError
from roundhouse.generation.chat_server import ChatServer
from roundhouse.generation.exchange import problem_of, refuse_unfit_engine
from roundhouse.generation.protocol import EngineUnreachable
from roundhouse.generation.serve_app import start_policy
from roundhouse.infra.checks import reachability
from roundhouse.weight_sync.replica_state import DesiredPolicy
from tests.generation import tiny
from tests.generation.servers import serve
from tests.gym.playground import serving

CONFIG = GenerationConfig(backend="transformers", max_model_len=512)
TOOLS, ASKED = [tiny.ADD_TOOL], tiny.TOOL_MESSAGES


@contextmanager
def engine(policy_dir: Path, config: GenerationConfig = CONFIG, plant: Any = None) -> Iterator[str]:
    """A real engine with version 1; `plant` spoils its server."""

    async def application() -> Any:
        policy, server = await start_policy(config, str(policy_dir), "only")
        await policy.apply(DesiredPolicy(policy_version=1, weights=str(policy_dir), request=1))
        return server if plant is None else plant(server)

    with serve(application) as url:
        yield url


def test_an_engine_as_runs_use_it_passes_with_and_without_tools(policies: dict[str, Path]) -> None:
    with engine(policies["first"]) as url:
        assert problem_of(url, CONFIG, ASKED, []) is None
        refuse_unfit_engine(url, CONFIG, ASKED, TOOLS)


def unparsed(server: ChatServer) -> ChatServer:
    """The parser of another model: it knows no `<tool_call>`."""
    server.codec.parse_tool_calls = lambda text, tools: (text, [])
    return server


def tokenized_anew(server: ChatServer) -> ChatServer:
    """Forgets the recorded tokens, and so tokenizes the history again."""
    prompt = server.codec.prompt

    def forgetful(request: Any) -> Any:
        plain = [{key: value for key, value in each.items() if "token" not in key} for each in request.messages]
        object.__setattr__(request, "messages", plain)
        return prompt(request)

    server.codec.prompt = forgetful  # type: ignore[method-assign]
    return server


@pytest.mark.parametrize(
    ("plant", "symptom", "cause", "key"),
    [
        (unparsed, "tool calls are not parsed", "the parser of another model", "generation.tool_call_parser"),
        (tokenized_anew, "tokens do not make the round trip", "tokenized again", "generation.engine_url"),
    ],
)
def test_a_planted_fault_is_named_with_its_cause_and_the_key_to_change(
    policies: dict[str, Path], plant: Any, symptom: str, cause: str, key: str
) -> None:
    with engine(policies["first"], plant=plant) as url:
        found = problem_of(url, CONFIG, ASKED, TOOLS)
        assert found is not None
        assert symptom in found.symptom
        assert cause in found.cause
        assert key in found.remedy
        with pytest.raises(ConfigError, match=key):
            refuse_unfit_engine(url, CONFIG, ASKED, TOOLS)


def test_tools_that_leave_no_room_in_the_context_are_found_before_the_first_rollout(policies: dict[str, Path]) -> None:
    short = CONFIG.model_copy(update={"max_model_len": 32})
    with engine(policies["first"], short) as url, pytest.raises(ConfigError, match=r"generation\.max_model_len"):
        refuse_unfit_engine(url, short, ASKED, TOOLS)


def test_nobody_at_the_url_may_pass_and_another_server_does_not() -> None:
    with pytest.raises(EngineUnreachable, match=r"generation\.engine_url"):
        refuse_unfit_engine("http://127.0.0.1:9", CONFIG, ASKED, [])
    other = FastAPI()
    other.get("/v1/models")(lambda: {"data": [{"id": "gpt-oss"}]})
    with serving(other) as url, pytest.raises(ConfigError, match=r"models \['gpt-oss'\], not 'policy'"):
        refuse_unfit_engine(url, CONFIG, ASKED, [])
    plain = FastAPI()
    plain.get("/v1/models")(lambda: {"data": [{"id": "policy"}]})
    answer = {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    plain.post("/v1/chat/completions")(lambda: answer)
    with serving(plain) as url, pytest.raises(ConfigError, match="chat completion with token IDs"):
        refuse_unfit_engine(url, CONFIG, ASKED, [])


def test_the_doctor_holds_the_same_exchange_with_the_engine_of_a_configuration(policies: dict[str, Path]) -> None:
    def finding(url: str) -> Any:
        generation = {"backend": "transformers", "engine_url": url, "request_timeout_seconds": 30}
        tree = {
            "run_id": "r",
            "environment": {"kind": "calculator"},
            "generation": generation | {"max_model_len": 2048},
        }
        [found] = [each for each in reachability.configured(parse_config(tree)) if each.name == "engine"]
        return found

    with engine(policies["first"], CONFIG.model_copy(update={"max_model_len": 2048}), unparsed) as url:
        assert finding(url).status == "fail"
        assert "tool calls are not parsed" in finding(url).detail
        assert "generation.tool_call_parser" in finding(url).remedy
    assert finding("http://127.0.0.1:9").status == "fail"


def test_a_template_that_writes_no_calls_proves_nothing_of_the_parser(
    policies: dict[str, Path], tmp_path: Path
) -> None:
    mute = tmp_path / "mute"
    mute.mkdir()
    for file in policies["first"].iterdir():
        (mute / file.name).write_bytes(file.read_bytes())
    settings = json.loads((mute / "tokenizer_config.json").read_text())
    template = tiny.CHAT_TEMPLATE
    settings["chat_template"] = template.replace("message.tool_calls or []", "[]")
    (mute / "tokenizer_config.json").write_text(json.dumps(settings))
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    with engine(mute) as url:
        assert problem_of(url, CONFIG, ASKED, TOOLS) is None
