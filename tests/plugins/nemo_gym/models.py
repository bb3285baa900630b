"""A model server with a scripted policy over real HTTP; it records its requests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roundhouse.config.models import Sampling
from roundhouse.generation.protocol import Completion
from roundhouse.rollout.responses import assistant_items, chat_messages, chat_tools, response_object, with_token_fields
from tests.gym.playground import Script, ScriptedPolicy, serving


@dataclass
class FakeModelServer:
    """Answers both routes from a script, under any path prefix."""

    script: Script
    tells_tokens: bool = True
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Statuses and bodies to answer with first."""
    seconds: float = 0.0
    """Time of an answer."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cookies: list[dict[str, str]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        self.cookies.append(dict(request.cookies))
        await asyncio.sleep(self.seconds)
        if self.failures:
            status, text = self.failures.pop(0)
            return Response(text, status)
        chat = request.url.path.endswith("/v1/chat/completions")
        messages = body["messages"] if chat else chat_messages(body["input"])
        tools = (body.get("tools") or []) if chat else chat_tools(body.get("tools") or [])
        policy = ScriptedPolicy(self.script)
        completion = await policy.complete(messages, tools, Sampling(max_new_tokens=1000), 0)
        reply = JSONResponse(self._chat(completion) if chat else self._response(completion))
        reply.set_cookie("model", str(len(self.bodies)))
        return reply

    def _tokens(self, completion: Completion) -> dict[str, Any]:
        if not self.tells_tokens:
            return {}
        return {
            "prompt_token_ids": completion.prompt_token_ids,
            "generation_token_ids": completion.generation_token_ids,
            "generation_log_probs": completion.generation_log_probs,
        }

    def _chat(self, completion: Completion) -> dict[str, Any]:
        message = {**completion.message, **self._tokens(completion)}
        choice = {"index": 0, "finish_reason": completion.finish_reason, "message": message}
        return {"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 1}, "policy_version": 3}

    def _response(self, completion: Completion) -> dict[str, Any]:
        output = with_token_fields(assistant_items(completion.message, "msg_1"), self._tokens(completion))
        return response_object(
            "resp_1", output, model="m", created_at=0.0, finish_reason=completion.finish_reason, output_tokens=1
        )


@contextmanager
def serving_model(script: Script, **options: Any) -> Iterator[tuple[FakeModelServer, str]]:
    server = FakeModelServer(script, **options)
    with serving(server.app()) as url:
        yield server, url
