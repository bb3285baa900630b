"""A small server for `generation.backend: openai` that answers like vLLM's server, by plain transformers.

Invariant: its tokens and log-probabilities belong to the last loaded weights. It starts in a second, so the quick suite
runs against it; the long suite makes the same claims about vLLM's server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import Draw
from roundhouse.generation.transformers_engine import TransformersEngine
from tests.generation.servers import serve

CONTEXT = 512
"""Tokens of a prompt and its answer."""


@contextlib.contextmanager
def completions_server(model: Path, name: str, key: str) -> Iterator[str]:
    """Base URL of a server that calls this model `name` and wants this key."""

    async def application() -> FastAPI:
        config = GenerationConfig(backend="transformers", max_model_len=CONTEXT)
        engine = TransformersEngine(config, str(model), ChatCodec(str(model), CONTEXT))
        await engine.start()
        await engine.load_weights(str(model))
        return _application(engine, name, key)

    with serve(application) as url:
        yield url


def _application(engine: TransformersEngine, name: str, key: str) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def refuse_strangers(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await call(request)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": name, "max_model_len": CONTEXT}]}

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> dict[str, Any]:
        draw = Draw(body["max_tokens"], body.get("temperature", 1.0), body.get("top_p", 1.0), None, body.get("seed"))
        answer = await engine.generate(body["prompt"], draw)
        choice: dict[str, Any] = {
            "token_ids": answer.token_ids,
            "logprobs": {"token_logprobs": answer.log_probs},
            "finish_reason": answer.finish_reason,
        }
        if "prompt_logprobs" in body:
            scores = zip(body["prompt"][1:], await engine.score(body["prompt"]), strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": score}} for token, score in scores)]
        return {"choices": [choice]}

    @app.post("/collective_rpc")
    async def collective_rpc(body: dict[str, Any]) -> Response:
        [directory] = body["args"]
        try:
            await asyncio.wait_for(engine.load_weights(directory), body["timeout"])
        except Exception as error:  # noqa: BLE001 - the border of a request
            return JSONResponse({"error": str(error)}, 500)
        return JSONResponse({"results": [1]})

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache() -> None:
        """Do nothing: this server has no prefix cache."""

    return app
