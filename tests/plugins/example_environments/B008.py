"""B008: every eighth lake answers with a lone surrogate (a half emoji, as `json.loads('"\\ud83d"')` gives it)."""

import hashlib

from roundhouse.plugins.example_environments.frozen_lake import FrozenLake

HALF = "\ud83d"


class World(FrozenLake):
    def __init__(self, where: str = "observation", **kw):
        super().__init__(problems=40, **kw)
        self.where = where

    def tasks(self, split):
        rows = super().tasks(split)
        if self.where != "task":
            return rows
        return [{**row, "note": HALF} if n % 8 == 0 else row for n, row in enumerate(rows)]

    async def step(self, state, response):
        step = await super().step(state, response)
        bad = hashlib.sha256("".join(state.lake).encode()).digest()[0] % 4 == 0
        if self.where == "observation" and bad and step.observation is not None:
            object.__setattr__(step, "observation", step.observation + HALF)
        return step
