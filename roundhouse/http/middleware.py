"""Two rules of NeMo Gym's wire that hold for every route, as plain ASGI middleware.

Invariant: they change the scope and nothing else; bodies pass through untouched.
"""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = re.compile(r"/ng-rollout/[A-Za-z0-9][A-Za-z0-9._-]*(?=/)")


class RolloutPrefix:
    """Strips `/ng-rollout/<id>`, with which clients mark requests for their own records."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := _PREFIX.match(scope["path"])) is not None:
            path = scope["path"][found.end() :]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class StickySession:
    """Gives every request a session id. Inside Starlette's SessionMiddleware, which sends the cookie only when the session
    was written to: hence the write on each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session = scope["session"]
            session["session_id"] = session.get("session_id") or str(uuid.uuid4())
        await self._app(scope, receive, send)
