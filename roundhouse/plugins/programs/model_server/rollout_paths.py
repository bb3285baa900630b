"""Rollouts in the paths of calls: `/ng-rollout/7-0/training-token-capture/v1/responses` is answered as `/v1/responses`, with or
without a record of the call."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = re.compile(r"/ng-rollout/([A-Za-z0-9][A-Za-z0-9._-]*)(/training-token-capture)?(?=/)")

KEY = "roundhouse.rollout"


@dataclass(frozen=True, slots=True)
class RolloutMark:
    """Rollout and recording flag from the path of a request."""

    rollout: str | None = None
    capture: bool = False
    """The call is recorded."""


class RolloutPath:
    """Middleware: removes the prefix from the path and stores a `RolloutMark` in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            mark, path = RolloutMark(), scope["path"]
            if (prefix := _PREFIX.match(path)) is not None:
                mark, path = RolloutMark(prefix[1], prefix[2] is not None), path[prefix.end() :]
                scope = {**scope, "path": path, "raw_path": path.encode()}
            scope[KEY] = mark
        await self._app(scope, receive, send)


PREFIX = "ng-rollout"

CAPTURE = "training-token-capture"


def path_prefix(name: str | None, *, capture: bool) -> str:
    """Return the prefix of a call's path: `ng-rollout/<id>`, `ng-rollout/<id>/training-token-capture`, or nothing."""
    if name is None:
        return ""
    return f"{PREFIX}/{name}/{CAPTURE}" if capture else f"{PREFIX}/{name}"
