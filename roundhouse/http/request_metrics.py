"""What an environment's server is asked, as Prometheus reads it.

Invariant: tools are one route, whatever they are called, so that no label grows with what a policy makes up.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram

METRICS = {
    "roundhouse_gym_request_seconds": "Requests of an environment's server, by route (verify, …; tool) and status.",
    "roundhouse_gym_requests_in_flight": "Requests that are being answered.",
}
ROUTES = ("seed_session", "verify", "close", "aggregate_metrics", "reset", "step", "mcp")
SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60)


class MeasuredRequests:
    """An ASGI application around another that measures its requests."""

    def __init__(self, app: Any, registry: CollectorRegistry) -> None:
        self._app = app
        seconds, in_flight = METRICS.items()
        self._seconds = Histogram(*seconds, ["route", "status"], buckets=SECONDS, registry=registry)
        self._in_flight = Gauge(*in_flight, registry=registry)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()

        async def counted(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._in_flight.inc()
        try:
            await self._app(scope, receive, counted)
        finally:
            self._in_flight.dec()
            self._seconds.labels(_route(scope), status).observe(time.perf_counter() - began)


def _route(scope: dict[str, Any]) -> str:
    last = scope["path"].rstrip("/").rsplit("/", 1)[-1]
    if last in ROUTES:
        return last
    return "tool" if scope["method"] == "POST" else "other"
