"""B019: one task of 12 hangs the thread it is judged on, or one expression of four the thread that calculates it."""

import re
import time
import zlib

from roundhouse.environments.base import tool
from roundhouse.environments.calculator import Calculator


def hangs(row):
    return zlib.crc32(row["task_id"].encode()) % 12 == 0


class World(Calculator):
    def __init__(self, how: str = "sleep", **kw):
        super().__init__(**kw)
        self.how = how

    @tool("Calculate with one operator.", expression="Two whole numbers with one of + - * / between them.")
    async def calculate(self, session, expression: str) -> str:
        if self.how == "tool" and zlib.crc32(expression.encode()) % 4 == 0:
            time.sleep(3600)
        return await super().calculate(session, expression)

    async def verify(self, session, row, response):
        if hangs(row) and self.how == "sleep":
            time.sleep(3600)
        if hangs(row) and self.how == "regex":
            re.fullmatch(r"(a+)+b", "a" * 40)
        return await super().verify(session, row, response)
