"""The rollout that a call belongs to, read off its path.

Invariant: only the path changes: `/ng-rollout/7-0/training-token-capture/v1/responses` is answered as `/v1/responses`, with or
without recording.

The name under which servers file the calls of one rollout.

Invariant: it is the name that NeMo Gym's collector will look for: the row's `_ng_rollout_id`, else its task and rollout index,
followed by the number of the attempt from the second one on.

    {"_ng_task_index": 3, "_ng_rollout_index": 0}                           3-0
    {"_ng_rollout_id": "abc", "_ng_attempt_index": 2}                       abc-a2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from roundhouse.rollout.failures import BadTaskRow

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


PREFIX = "ng-rollout"
CAPTURE = "training-token-capture"

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def rollout_id(row: Mapping[str, Any]) -> str | None:
    """The rollout's name; None when the row has nothing to name it by.

    Raises:
        BadTaskRow: `_ng_rollout_id` cannot stand in a path, or `_ng_attempt_index` is no number.
    """
    name = row.get("_ng_rollout_id")
    if name is None:
        task, rollout = row.get("_ng_task_index"), row.get("_ng_rollout_index")
        if task is None or rollout is None:
            return None
        name = f"{task}-{rollout}"
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise BadTaskRow(
            f"_ng_rollout_id is {name!r}: letters, digits, dots, dashes and underscores, a letter or digit first."
        )
    attempt = row.get("_ng_attempt_index") or 0
    if not isinstance(attempt, int):
        raise BadTaskRow(f"_ng_attempt_index is {attempt!r}; it must be a whole number.")
    return f"{name}-a{attempt}" if attempt > 0 else name


def path_prefix(name: str | None, *, capture: bool) -> str:
    """What precedes the path of a call: `ng-rollout/<id>`, `ng-rollout/<id>/training-token-capture`, or nothing."""
    if name is None:
        return ""
    return f"{PREFIX}/{name}/{CAPTURE}" if capture else f"{PREFIX}/{name}"
