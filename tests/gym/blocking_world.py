"""An environment that blocks in the part and in the way that its rows request."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, task_row, tool

if TYPE_CHECKING:
    from roundhouse.plugins.programs.command import CommandOutcome

HOW = ("sleep", "loop", "regex")


def block(how: str) -> None:
    if how == "sleep":
        time.sleep(3600)
    elif how == "loop":
        while True:
            pass
    elif how == "regex":
        re.fullmatch(r"(a+)+b", "a" * 40)
    elif how == "exit":
        os._exit(3)
    elif how == "quit":
        sys.exit(3)
    elif how == "cancel":
        raise asyncio.CancelledError


class Blocking(Environment):
    """Its verifier and its tool block if a row names a way."""

    name = "blocking"

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [self.row(how) for how in ("", *HOW)]

    def row(self, how: str, where: str = "verify") -> TaskRow:
        return task_row("x", task_id=f"{where}-{how or 'fine'}", tools=self.tool_schemas(), how=how, where=where)

    async def seed_session(self, row: TaskRow) -> TaskRow:
        return row

    @tool("Wait.")
    async def wait(self, session: TaskRow) -> str:
        block(session["how"] if session["where"] == "tool" else "")
        return "waited"

    async def verify(self, session: TaskRow, row: TaskRow, response: dict[str, Any]) -> Verdict:
        block(row["how"] if row["where"] == "verify" else "")
        return Verdict(1.0)


class Later(Blocking):
    """The verifier starts a callback that holds the interpreter's lock later."""

    async def verify(self, session: TaskRow, row: TaskRow, response: dict[str, Any]) -> Verdict:
        asyncio.get_running_loop().call_later(0.1, block, "regex")
        await asyncio.sleep(3600)
        return Verdict(1.0)


class Unshowable(Blocking):
    """Its verifier raises an error that cannot be shown."""

    name = "unshowable"

    async def verify(self, session: TaskRow, row: TaskRow, response: dict[str, Any]) -> Verdict:
        class Mute(Exception):
            def __str__(self) -> str:
                raise ValueError("no text")

            __repr__ = __str__

        raise Mute


class Unordered(Environment):
    """Its tools may run concurrently, because it has no `seed_session`."""

    name = "unordered"

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return []

    @tool("Wait.")
    async def wait(self, session: None) -> str:
        block("sleep")
        return "waited"

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(1.0)


class Hanging(Blocking):
    """Its sessions never begin."""

    name = "hanging"

    async def seed_session(self, row: TaskRow) -> TaskRow:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 - what it does wrong


class Plain(Blocking):
    """An environment of which nothing blocks; the code that judges reads `how`."""

    def tasks(self, split: Split) -> list[TaskRow]:
        return [task_row("x", task_id=how or "fine", how=how) for how in ("", "regex", "sleep")]

    async def verify(self, session: TaskRow, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(0.0)


def score(task: TaskRow, items: list[dict[str, Any]]) -> float:
    """A criterion of a rubric."""
    block(task["how"])
    return 1.0


def judge(task: TaskRow, outcome: CommandOutcome) -> float:
    """A verifier of a command."""
    return score(task, [])
