"""The client's errors have the type of their origin, and no call exceeds its limit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.generation.client import HttpPolicyClient, error_of, without_older_tokens
from roundhouse.generation.protocol import (
    BadReply,
    ContextOverflow,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient
from roundhouse.rollout.plan import RolloutSpec
from tests.generation import tiny
from tests.generation.servers import serve, transformers_server
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import rollout_config
from tests.ports import free_port

CONFIG = GenerationConfig(request_timeout_seconds=5)
SAMPLING = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def url(policies: dict[str, Path]) -> Iterator[str]:
    with transformers_server(policies["first"]) as url:
        yield url


async def test_it_completes_and_keeps_the_tokens_out_of_the_message(url):
    async with HttpPolicyClient(url, CONFIG) as policy:
        completion = await policy.complete(tiny.TOOL_MESSAGES, [tiny.ADD_TOOL], SAMPLING, seed=1)
    assert set(completion.message) == {"role", "content"}
    assert len(completion.generation_token_ids) == 4
    assert completion.policy_version == 1
    assert completion.latency_seconds > 0


async def test_a_conversation_that_does_not_fit_is_a_context_overflow(url):
    async with HttpPolicyClient(url, CONFIG) as policy:
        with pytest.raises(ContextOverflow, match="maximum context length is 512"):
            await policy.complete([{"role": "user", "content": "hello " * 600}], [], SAMPLING, seed=1)


async def test_a_request_that_is_wrong_is_rejected(url):
    async with HttpPolicyClient(url, CONFIG, model="other") as policy:
        with pytest.raises(EngineRejected, match="not served here"):
            await policy.complete(tiny.TOOL_MESSAGES, [], SAMPLING, seed=1)


async def test_a_closed_port_is_unreachable():
    port = free_port()
    async with HttpPolicyClient(f"http://127.0.0.1:{port}", CONFIG) as policy:
        with pytest.raises(EngineUnreachable):
            await policy.complete(tiny.TOOL_MESSAGES, [], SAMPLING, seed=1)


async def test_an_engine_that_never_answers_is_a_timeout_within_the_limit():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with HttpPolicyClient(url, GenerationConfig(request_timeout_seconds=0.5)) as policy:
            with pytest.raises(EngineTimeout, match="request_timeout_seconds"):
                async with asyncio.timeout(30):
                    await policy.complete(tiny.TOOL_MESSAGES, [], SAMPLING, seed=1)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, b"{}", BadReply),
        (200, b'{"choices": [{"message": null}]}', BadReply),
        (200, b"<html>Welcome to nginx!</html>", BadReply),
        (500, b'{"error": {"code": "engine_error", "message": "CUDA error"}}', EngineFailed),
        (500, b"<html>Internal Server Error</html>", EngineFailed),
        (403, b"<html>Forbidden</html>", EngineFailed),
        (503, b"<html>no upstream</html>", EngineUnreachable),
    ],
)
async def test_an_engine_that_answers_amiss_is_not_one_that_is_not_there(status, body, error):
    async def other(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def make():
        return other

    with serve(make) as url:
        async with HttpPolicyClient(url, CONFIG) as policy:
            with pytest.raises(error, match=f"answered {status}"):
                await policy.complete(tiny.TOOL_MESSAGES, [], SAMPLING, seed=1)


@pytest.mark.parametrize("rollout", ["task/3", "two words ä\n#2@7/0"])
async def test_the_calls_of_a_rollout_name_it_and_those_of_a_judge_do_not(rollout):
    sent: list[dict[bytes, bytes]] = []

    async def refusing(scope, receive, send):
        sent.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def make():
        return refusing

    group, _, sample = rollout.rpartition("/")
    spec = RolloutSpec(group, int(sample), counter_row(), seed=1)
    with serve(make) as url:
        async with HttpPolicyClient(url, CONFIG) as policy:
            await run_rollout(spec, policy, LocalEnvironmentClient(Counter()), rollout_config(), SAMPLING)
            with pytest.raises(EngineFailed):
                await policy.complete(tiny.TOOL_MESSAGES, [], SAMPLING, seed=1)
    assert [each.get(b"x-session-id") for each in sent] == [quote(rollout).encode(), None]


def test_a_404_of_a_proxy_without_replicas_passes_by_itself_and_ours_does_not():
    assert isinstance(error_of(404, b"Path '/v1/chat/completions' not found.", "u"), EngineUnreachable)
    assert isinstance(error_of(404, b'{"error": {"code": "model_not_found", "message": "m"}}', "u"), EngineRejected)
    assert isinstance(
        error_of(503, b'{"error": {"code": "policy_unavailable", "message": "m"}}', "u"), EngineUnreachable
    )


def test_recorded_tokens_travel_once():
    def assistant(text: str) -> dict:
        tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
        return {"role": "assistant", "content": text} | tokens

    user = {"role": "user", "content": "u"}
    older, newer = assistant("a"), assistant("b")
    sent = without_older_tokens([user, older, user, newer, user])
    assert sent == [user, {"role": "assistant", "content": "a"}, user, newer, user]
    assert older["prompt_token_ids"] == [1]
