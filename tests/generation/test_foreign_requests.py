"""A request to a foreign server names every parameter that shapes the distribution, since the server fills in the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.openai_engine import OpenAIEngine, TextEngine
from roundhouse.generation.protocol import ALL_TOKENS, NEUTRAL_SAMPLING, Draw, EngineUnreachable
from roundhouse.generation.transformers_engine import TransformersEngine
from tests.generation import tiny


class Codec:
    """The part of a `ChatCodec` that these engines read."""

    stop_token_ids, end_of_turn_id = (2,), 2
    tokenizer: Any = None
    control: Any = None

    def __init__(self) -> None:
        self.tokenizer = self.control = self

    def spelled_in(self, ids: list[int]) -> int:
        return 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "ab"

    def encode(self, text: str) -> list[int]:
        return [5]

    def convert_ids_to_tokens(self, token: int) -> str:
        return "<end>"


class Server:
    """Answers as the three kinds do. `unknown` fields are refused with 400."""

    def __init__(self, unknown: frozenset[str] = frozenset(), status: int = 400) -> None:
        self.unknown, self.status = unknown, status
        self.bodies: list[dict[str, Any]] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        body = json.loads(request.content)
        if self.unknown & body.keys():
            return httpx.Response(self.status, json={"error": "unknown fields"})
        self.bodies.append(body.get("sampling_params", body))
        choice = {"text": "a", "finish_reason": "stop", "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 5, None]]}
        return httpx.Response(200, json={"choices": [choice], "meta_info": meta})


def engine_of(kind: type[OpenAIEngine], server: Server) -> OpenAIEngine:
    endpoint = {"url": "http://127.0.0.1:1", "model": "served"}
    engine = kind(GenerationConfig.model_validate({"backend": "openai", "endpoint": endpoint}), Codec())  # type: ignore[arg-type]
    engine._http = httpx.AsyncClient(base_url=endpoint["url"], transport=httpx.MockTransport(server.answer))
    return engine


async def names_every_parameter(kind: type[OpenAIEngine], top_k: int | None, least_tokens: str = "min_tokens") -> None:
    """Assert that a request names each; `least_tokens`: the name of the smallest length."""
    server = Server()
    await engine_of(kind, server).generate([5, 6], Draw(4, temperature=0.7, top_p=0.9, top_k=top_k))
    (body,) = server.bodies
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "min_p": 0,
        least_tokens: 0,
        "ignore_eos": False,
    }
    assert len(neutral) == len(NEUTRAL_SAMPLING)
    shaping = {"temperature": 0.7, "top_p": 0.9, "top_k": ALL_TOKENS if top_k is None else top_k} | neutral
    assert {name: body.get(name, "left to the server") for name in shaping} == shaping


@pytest.mark.parametrize("kind", [OpenAIEngine, TextEngine])
@pytest.mark.parametrize("top_k", [None, 7])
async def test_every_parameter_that_shapes_the_distribution_is_named(
    kind: type[OpenAIEngine], top_k: int | None
) -> None:
    await names_every_parameter(kind, top_k)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_text_server_that_refuses_other_fields_than_openais_gets_none(status: int) -> None:
    server = Server(frozenset({"min_p", "repetition_penalty"}), status)
    engine = engine_of(TextEngine, server)
    await engine.start()
    await engine.generate([5], Draw(4))
    assert all({"frequency_penalty", "presence_penalty"} <= body.keys() for body in server.bodies)
    assert not any(server.unknown & body.keys() for body in server.bodies)


async def test_another_failure_of_a_text_server_ends_the_start() -> None:
    with pytest.raises(EngineUnreachable, match="answered 503"):
        await engine_of(TextEngine, Server(frozenset({"min_p"}), 503)).start()


async def test_generation_config_json_does_not_change_what_an_own_engine_draws(tmp_path: Path) -> None:
    """It serves to find the end-of-turn token alone. Qwen's has a repetition penalty and top_k 20, which training lacks."""
    answers = []
    for skew in ({}, {"repetition_penalty": 5.0, "top_k": 1, "temperature": 0.1, "min_p": 0.9, "do_sample": True}):
        model = tiny.make_model(tmp_path / f"model-{len(skew)}", seed=1)
        path = model / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | skew))
        engine = TransformersEngine(
            GenerationConfig(backend="transformers", max_model_len=64), str(model), ChatCodec(str(model), 64)
        )
        await engine.start()
        await engine.load_weights(str(model))
        answer = await engine.generate([5, 6, 7, 5, 6, 7], Draw(24, seed=3))
        answers.append((answer.token_ids, answer.log_probs))
        engine.shutdown()
    assert answers[0] == answers[1]
