"""The few OpenAI routes beside chat completions, for engines that bring no server of their own.

Invariant: replies have the shapes of vLLM's routes of the same names, so a client need not know which engine answers.
"""

from __future__ import annotations

from typing import Any

import orjson

from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.chat_server import Receive, Send, read_body, reply, reply_error


class OpenAIRoutes:
    """/v1/models, /detokenize, and /tokenize of plain text; conversations are tokenised by the chat server."""

    def __init__(self, codec: ChatCodec, model: str) -> None:
        self.codec = codec
        self.model = model

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"])
        if route == ("GET", "/v1/models"):
            model = {
                "id": self.model,
                "object": "model",
                "owned_by": "roundhouse",
                "max_model_len": self.codec.max_model_len,
            }
            await reply(send, 200, {"object": "list", "data": [model]})
            return
        answers = {("POST", "/tokenize"): self._tokenize, ("POST", "/detokenize"): self._detokenize}
        if route not in answers:
            await reply_error(send, 404, "not_found", f"There is nothing at {scope['path']}.")
            return
        try:
            body = orjson.loads(await read_body(receive))
            await reply(send, 200, answers[route](body))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            await reply_error(send, 400, "invalid_request", f"{type(error).__name__}: {error}")

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = self.codec.encode(body["prompt"])
        return {"count": len(tokens), "max_model_len": self.codec.max_model_len, "tokens": tokens, "token_strs": None}

    def _detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": self.codec.tokenizer.decode(body["tokens"])}
