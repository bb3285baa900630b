"""An engine that answers at once, over real HTTP: byte tokens, prefix continuation, planted faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from roundhouse.generation.protocol import TOKEN_FIELDS
from tests.gym.playground import serving

Message = dict[str, Any]
Fault = tuple[int, bytes]


def say(text: str | None = "ok", **fields: Any) -> Callable[[list[Message]], Message]:
    return lambda messages: {"role": "assistant", "content": text, **fields}


def call(name: str = "add", arguments: str = '{"n":3}', call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class FakeEngine:
    """One token a byte. The prompt continues the newest recorded tokens, as our engines do."""

    reply: Callable[[list[Message]], Message] = field(default_factory=say)
    tokens: str = "message"
    """Where the token IDs stand: message, reply, logprobs, both, none."""
    finish_reason: str = "stop"
    fault: Callable[[dict[str, Any]], Fault | None] = lambda body: None
    seconds: float = 0.0
    healthy: bool = True
    hangs: bool = False
    policy_version: int | None = 3
    requests: list[dict[str, Any]] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)
    cancelled: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        status, answer = await self._answer(scope, receive, body)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(self, scope: Any, receive: Any, body: bytes) -> Fault:
        if self.hangs:
            gone = asyncio.ensure_future(receive())
            await asyncio.wait({gone}, timeout=30)
            gone.cancel()
            self.cancelled += 1
            return 500, b""
        if scope["path"] == "/health":
            return (200 if self.healthy else 503), b"{}"
        if scope["path"] == "/tokenize":
            asked = orjson.loads(body)
            self.tokenized.append(asked)
            return 200, orjson.dumps({"tokens": prompt_of(asked["messages"])})
        if scope["path"] != "/v1/chat/completions":
            return 404, b'{"error":{}}'
        asked = orjson.loads(body)
        self.requests.append(asked)
        self.headers.append(dict(scope["headers"]))
        if self.seconds:
            gone = asyncio.ensure_future(receive())
            await asyncio.wait({gone}, timeout=self.seconds)
            self.cancelled += gone.done()
            gone.cancel()
        return self.fault(asked) or (200, orjson.dumps(self.completion(asked)))

    def completion(self, asked: dict[str, Any]) -> dict[str, Any]:
        message = dict(self.reply(asked["messages"]))
        prompt = prompt_of(asked["messages"])
        generated = list(json.dumps(message).encode())
        log_probs = [-0.5] * len(generated)
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        reply: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": asked["model"]}
        reply["choices"] = [choice]
        reply["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(generated), "total_tokens": 9}
        if self.policy_version is not None:
            reply["policy_version"] = self.policy_version
        if self.tokens in ("message", "both"):
            message |= dict(zip(TOKEN_FIELDS, (prompt, generated, log_probs), strict=True))
        if self.tokens in ("reply", "both"):
            reply["prompt_token_ids"], choice["token_ids"] = prompt, generated
        if self.tokens in ("reply", "both", "logprobs"):
            pairs = zip(generated, log_probs, strict=True)
            choice["logprobs"] = {"content": [{"token": f"token_id:{t}", "logprob": p} for t, p in pairs]}
        return reply


def prompt_of(messages: list[Message]) -> list[int]:
    for place in range(len(messages) - 1, -1, -1):
        told = messages[place]
        if told.get("prompt_token_ids"):
            return told["prompt_token_ids"] + told["generation_token_ids"] + _bytes(messages[place + 1 :])
    return _bytes(messages)


def _bytes(messages: list[Message]) -> list[int]:
    bare = [{key: value for key, value in message.items() if key not in TOKEN_FIELDS} for message in messages]
    return list(json.dumps(bare).encode())


@contextmanager
def engines(*fakes: FakeEngine) -> Iterator[list[str]]:
    """Base URLs of the engines."""
    if not fakes:
        yield []
        return
    with serving(fakes[0]) as url, engines(*fakes[1:]) as others:
        yield [url, *others]
