"""An environment that rewards the use of another server's tool. Processes of user code import this module alone."""

from __future__ import annotations

from roundhouse.environments.base import Environment, Verdict
from tests.gym.counter import counter_row


class Spelling(Environment):
    """Rewards a rollout that called `define`, by that bare name."""

    name = "spelling"

    def tasks(self, split):
        return [counter_row()]

    async def verify(self, session, row, response):
        names = [item["name"] for item in response["output"] if item["type"] == "function_call"]
        return Verdict(float("define" in names))
