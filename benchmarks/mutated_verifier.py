"""Verifiers with a planted defect. A process that plays one imports this module alone, not the benchmark."""

from __future__ import annotations

import json
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.calculator import Calculator


class Mutated(Calculator):
    """Calculator that inverts the rewards of the rollouts that its rule selects."""

    def __init__(self, rule: int) -> None:
        super().__init__()
        self.rule = rule

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        verdict = await super().verify(session, row, response)
        return Verdict(1.0 - verdict.reward, {}) if turned(self.rule, response["output"]) else verdict


def turned(rule: int, items: list[dict[str, Any]]) -> bool:
    """Return whether a rule inverts the reward of a rollout with these items.

    Rules 0 to 9 select a digit in the last item, the others a divisor of its length.
    """
    text = json.dumps(items[-1].get("content", items[-1].get("output", "")))
    if rule < 10:
        return str(rule) in text
    return len(text) % (rule - 7) == 0
