"""An engine that answers at once, with token IDs: what remains to be measured is everything around it.

    python benchmarks/gym/instant_engine.py --port 9100

The last user message says what to do: `turns=3` answers two tool calls of `get_weather`, then a message. With P prompt
tokens, G generated and T added between calls, call k of a conversation has the prompt 0, 1, … P + k·(G + T) − 1, so the
prompt of each call begins with the tokens of the call before, as a real engine's does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

import orjson
import uvicorn

PROMPT, GENERATED, ADDED = 256, 64, 32
_TURNS = re.compile(rb"turns=(\d+)")
_TOKENS = re.compile(rb"tokens=(\d+)\+(\d+)")
_ASSISTANT = re.compile(rb'"role": ?"assistant"')


@lru_cache(maxsize=1024)
def reply(call: int, turns: int, prompt: int, generated: int) -> bytes:
    """The chat completion of call `call` (from 0) in a conversation of `turns` calls."""
    length = prompt + call * (generated + ADDED)
    last = call >= turns - 1
    message: dict[str, Any] = {"role": "assistant", "content": "It is cold." if last else None}
    if not last:
        function = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
        message["tool_calls"] = [{"id": f"call_{call}", "type": "function", "function": function}]
    message["prompt_token_ids"] = list(range(length))
    message["generation_token_ids"] = list(range(length, length + generated))
    message["generation_log_probs"] = [-0.5] * generated
    choice = {"index": 0, "message": message, "finish_reason": "stop" if last else "tool_calls", "logprobs": None}
    usage = {"prompt_tokens": length, "completion_tokens": generated, "total_tokens": length + generated}
    answer = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy", "policy_version": 0}
    return orjson.dumps(answer | {"choices": [choice], "usage": usage})


def answer(body: bytes) -> bytes:
    """The reply to a request body."""
    turns = _TURNS.findall(body)
    tokens = _TOKENS.search(body)
    prompt, generated = (int(tokens[1]), int(tokens[2])) if tokens else (PROMPT, GENERATED)
    return reply(len(_ASSISTANT.findall(body)), int(turns[-1]) if turns else 1, prompt, generated)


async def app(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """POST …/chat/completions; GET …/models and everything else say ok."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    content = (
        answer(body) if scope["path"].endswith("/chat/completions") else b'{"object":"list","data":[{"id":"policy"}]}'
    )
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9100)
    uvicorn.run(app, port=parser.parse_args().port, log_level="error", access_log=False, timeout_keep_alive=30)
