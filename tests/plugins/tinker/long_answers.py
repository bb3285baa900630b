"""An environment with different rewards for any policy: the length of its answer."""

from __future__ import annotations

from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, closing_text
from roundhouse.environments.single_turn import Sort


class LongAnswers(Sort):
    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(reward=min(1.0, len(closing_text(response)) / 40))
