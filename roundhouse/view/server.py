"""The viewer over HTTP, for the person at this machine.

Invariants: nothing can be written (only GET is answered); a page of another site can read nothing
(`roundhouse.http.same_origin`, nothing is shared across origins); and nothing that a rollout says can run
(Content-Security-Policy allows our own files only, and those build the page from text nodes).
"""

from __future__ import annotations

import importlib.resources
import mimetypes
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.http.same_origin import SameOrigin
from roundhouse.view.answers import Answers
from roundhouse.view.scope import ViewError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}
_HOST = "127.0.0.1"
STATIC = importlib.resources.files("roundhouse.view") / "static"


def create_app(store: str) -> Starlette:
    """The viewer over a store, as an ASGI application."""
    answers = Answers(store)
    routes = [
        Route(f"/api/{name}", _endpoint(answer), methods=["GET"], name=name)
        for name, answer in answers.routes().items()
    ]
    routes += [Route("/", _page, methods=["GET"]), Route("/static/{name}", _static, methods=["GET"])]
    # Names that are used with other methods get 405 from the routes themselves.
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(_Guarded),
            Middleware(SameOrigin, host=_HOST),
            Middleware(GZipMiddleware, minimum_size=4096),
        ],
    )


def serve(store: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Answer on the loopback interface until interrupted.

    Args:
        port: 0 takes a free one.
        on_ready: called with the page's address once it answers.

    Raises:
        ViewError: the port is taken.
    """
    import socket

    import uvicorn

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((_HOST, port))
        except OSError as error:
            raise ViewError(f"--port {port}: {error.strerror}. Leave it out, and a free port is taken.") from error
        listening.listen(128)
        on_ready(f"http://{_HOST}:{listening.getsockname()[1]}/")
        config = uvicorn.Config(create_app(store), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])


def _endpoint(answer: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        try:
            return _json(answer(request.query_params))
        except ViewError as error:
            return _json({"error": str(error)}, 404)
        except StoreError as error:
            return _json({"error": str(error)}, 502)
        except RoundhouseError as error:
            return _json({"error": str(error)}, 400)

    return endpoint


def _json(value: Any, status: int = 200) -> Response:
    # NaN becomes null.
    return Response(orjson.dumps(value), status, media_type="application/json")


def _page(request: Request) -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html")


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    known = {entry.name: entry for entry in STATIC.iterdir()}
    if name not in known:
        return Response("no such file", 404, media_type="text/plain")
    return Response(known[name].read_bytes(), media_type=mimetypes.guess_type(name)[0] or "application/octet-stream")


class _Guarded:
    """Puts the headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS.items()]
            await send(message)

        await self._app(scope, receive, send_guarded)
