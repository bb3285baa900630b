"""A server in an engine's place: the stages collect from it over real HTTP, and its faults are planted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import orjson


class ScriptedEngine(ThreadingHTTPServer):
    """Answers every conversation with the result of `say` for its request; after `healthy` answers, with 500."""

    daemon_threads = True

    def __init__(self, say: Callable[[dict[str, Any]], str] = lambda _: "The answer is 7.") -> None:
        super().__init__(("127.0.0.1", 0), ScriptedAnswer)
        self.say = say
        self.requests: list[dict[str, Any]] = []
        """Those that were answered."""
        self.healthy = 10**6
        self.log_prob = -0.5

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of the answered requests."""
        return [request["seed"] for request in self.requests]

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()

    def fail(self, answer: ScriptedAnswer) -> None:
        answer.send(500, {"detail": "out of order"})


class ScriptedAnswer(BaseHTTPRequestHandler):
    server: ScriptedEngine
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was killed
            super().handle()

    def do_POST(self) -> None:
        engine = self.server
        request = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(engine.requests) >= engine.healthy:
            return engine.fail(self)
        engine.requests.append(request)
        message = {
            "role": "assistant",
            "content": engine.say(request),
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4, 5],
            "generation_log_probs": [engine.log_prob] * 2,
        }
        return self.send(200, {"choices": [{"message": message, "finish_reason": "stop"}], "policy_version": 0})

    def send(self, status: int, body: dict[str, Any]) -> None:
        data = orjson.dumps(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
