"""A server's reply with one of its places replaced, and an engine that reads such replies."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest

from roundhouse.config.models import GenerationConfig
from roundhouse.errors import RoundhouseError
from roundhouse.generation.openai_engine import OpenAIEngine
from roundhouse.generation.protocol import Draw
from roundhouse.trajectories.storable import call_problem

ODD: list[Any] = [None, True, -1, 10**400, math.nan, "x\ud83d", ["x"], {}]
NO_JSON = ["<html>", "", "[" * 100_000, "9" * 10_000]


def mutants(value: Any) -> Iterator[Any]:
    """The value with one of its places replaced or removed."""
    yield from ODD
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, inner in list(places):
        copy = value.copy()
        del copy[place]
        yield copy
        for mutant in mutants(inner):
            copy = value.copy()
            copy[place] = mutant
            yield copy


def texts(value: Any) -> Iterator[bytes]:
    for mutant in mutants(value):
        yield json.dumps(mutant).encode()
    yield from (text.encode() for text in NO_JSON)


class Codec:
    """The parts of a codec that an engine uses: a token is a byte."""

    stop_token_ids = frozenset({2})
    end_of_turn_id = 2

    class control:
        @staticmethod
        def spelled_in(ids: Any) -> int:
            return 0

    class tokenizer:
        @staticmethod
        def decode(ids: Any, **options: Any) -> str:
            return "p"

        @staticmethod
        def convert_ids_to_tokens(token: int) -> str:
            return "e"

    @staticmethod
    def encode(text: str) -> list[int]:
        return list(text.encode())


MODELS = {"data": [{"id": "served", "max_model_len": 512}]}
CALLS: dict[str, Callable[[OpenAIEngine], Awaitable[Any]]] = {
    "start": lambda engine: engine.start(),
    "generate": lambda engine: engine.generate([0, 1], Draw(max_tokens=4)),
    "score": lambda engine: engine.score([0, 1]),
    "load": lambda engine: engine.load_weights("/m", 0),
    "health": lambda engine: engine.check_health(),
}


async def attack(
    engine_class: type[OpenAIEngine],
    endpoint: dict[str, Any],
    routes: dict[str, Any],
    call: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Call the engine once with each mutant of a reply.

    Args:
        endpoint: the keys of `generation.endpoint` beside `url` and `model`.
        routes: the right reply by path; the first one draws tokens, the others load weights.

    Raises:
        AssertionError: a value that the engine returns is invalid.
    """
    replies = {path: orjson.dumps(reply) for path, reply in (routes | {"/v1/models": MODELS}).items()}
    changed: dict[str, bytes] = {}
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(
            lambda request: httpx.Response(200, content=(replies | changed)[request.url.path])
        ),
        base_url="http://engine",
    )
    monkeypatch.setattr("roundhouse.generation.openai_engine.async_http_client", lambda *_, **__: client)
    endpoint = {"url": "http://engine", "model": "served", **endpoint}
    engine = engine_class(GenerationConfig(backend="openai", max_model_len=256, endpoint=endpoint), Codec())  # type: ignore[arg-type]
    drawing = next(iter(routes))
    paths = {"start": ["/v1/models", drawing], "health": ["/v1/models"], "load": [*routes][1:]}.get(call, [drawing])
    for path in paths:
        for text in texts((routes | {"/v1/models": MODELS})[path]):
            changed.clear()
            changed[path] = text
            try:
                result = await CALLS[call](engine)
            except RoundhouseError:
                continue
            if call == "generate":
                assert not call_problem([], result.token_ids, result.log_probs, 0), text
                assert min(result.token_ids) >= 0, text
                assert math.isfinite(sum(result.log_probs)), text
            if call == "score":
                assert math.isfinite(sum(result)), text
