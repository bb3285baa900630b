"""The rollout that a call belongs to, read off its path.

Invariant: only the path changes: `/ng-rollout/7-0/training-token-capture/v1/responses` is answered as `/v1/responses`, with or
without recording.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = re.compile(r"/ng-rollout/([A-Za-z0-9][A-Za-z0-9._-]*)(/training-token-capture)?(?=/)")
KEY = "roundhouse.rollout"


@dataclass(frozen=True, slots=True)
class RolloutMark:
    """What a path says of the rollout."""

    rollout: str | None = None
    capture: bool = False
    """The path asks for the call to be recorded."""


class RolloutPath:
    """Strips the prefix and leaves a `RolloutMark` in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            mark, path = RolloutMark(), scope["path"]
            if (found := _PREFIX.match(path)) is not None:
                mark, path = RolloutMark(found[1], found[2] is not None), path[found.end() :]
                scope = {**scope, "path": path, "raw_path": path.encode()}
            scope[KEY] = mark
        await self._app(scope, receive, send)
