"""Each place of a reply of a gym's server, replaced by another type: the reader returns valid values or a typed error."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.http.replies import MALFORMED
from roundhouse.plugins.nemo_gym import owned
from roundhouse.plugins.nemo_gym.clients.connection import Connection, look_up
from roundhouse.plugins.nemo_gym.clients.model import read_chat
from roundhouse.plugins.nemo_gym.servers.head import read_instances
from roundhouse.trajectories.storable import call_problem
from tests.security.mutants import mutants, texts


def test_a_model_servers_completion_is_valid_or_refused() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    reply = {
        "choices": [{"message": {"content": "hi", "tool_calls": [call], **tokens}, "finish_reason": "stop"}],
        "policy_version": 0,
    }
    for mutant in mutants(reply):
        try:
            read = read_chat(mutant, 0.0)
        except (RoundhouseError, *MALFORMED):
            continue
        assert not call_problem(
            read.prompt_token_ids, read.generation_token_ids, read.generation_log_probs, read.policy_version
        )
        assert isinstance(read.message["content"], str | list | None)


def test_a_list_of_servers_is_valid_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"process_name": "a", "server_type": "responses_api_agents", "url": None}
    assert read_instances(200, orjson.dumps([one]).decode(), "http://head") == [one]
    monkeypatch.setenv(owned.SERVERS_VARIABLE, "http://head")
    for text in texts([{**one, "url": "http://a"}]):
        transport = httpx.MockTransport(lambda request, text=text: httpx.Response(200, content=text))
        monkeypatch.setattr(
            owned,
            "http_client",
            lambda *_, transport=transport, **__: httpx.Client(transport=transport, base_url="http://head"),
        )
        try:
            agents = owned.agents_of(None)  # type: ignore[arg-type]
        except InfraError:
            continue
        assert all(isinstance(agent, str) for agent in agents)


@pytest.mark.parametrize(
    "text", ["a: !!bool x", "a: !!timestamp x", "a: !!int x", "a: 2026-02-31", "a: " + ":".join(["59"] * 5_000)]
)
async def test_a_configuration_with_a_value_that_cannot_be_read_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: Any, **__: Any) -> tuple[int, str, dict[str, str]]:
        return 200, orjson.dumps(text).decode(), {}

    monkeypatch.setattr(Connection, "exchange", answer)
    with pytest.raises(InfraError, match="no JSON string of YAML"):
        await look_up(Connection("http://head"), "a")


async def test_a_huge_configuration_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: Any, **__: Any) -> tuple[int, str, dict[str, str]]:
        return 200, orjson.dumps("#\n" * 10**6).decode(), {}

    monkeypatch.setattr(Connection, "exchange", answer)
    with pytest.raises(InfraError, match="2000000 characters"):
        await look_up(Connection("http://head"), "a")
