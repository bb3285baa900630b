"""An environment for tests that adds numbers, with faults that rows plant. Processes of user code import this module alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, final_text, task_row, tool
from roundhouse.errors import InfraError


class SandboxDown(InfraError):
    """A service of the environment has failed."""


@dataclass
class Account:
    owner: str
    total: int = 0
    closed: int = 0


class Counter(Environment):
    """Adds numbers to a session's total. A row's `verdict` controls its verifier."""

    name = "counter"

    def __init__(self) -> None:
        self.accounts: list[Account] = []
        """Every session ever opened."""

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [counter_row(f"{split}-{index}") for index in range(20)]

    async def seed_session(self, row: TaskRow) -> Account:
        if row.get("seed") == "raises":
            raise ValueError("no such owner")
        if row.get("seed") == "infra":
            raise SandboxDown("the sandbox is gone")
        account = Account(owner=row["task_id"])
        self.accounts.append(account)
        return account

    async def close_session(self, session: Account) -> None:
        session.closed += 1
        if session.owner == "cannot close":
            raise RuntimeError("the account is stuck")
        if session.owner == "closes for ever":
            await asyncio.sleep(3600)

    @tool("Add to the total.", n="What to add.")
    async def add(self, session: Account, n: int, times: int = 1) -> dict[str, Any]:
        await asyncio.sleep(0)
        session.total += n * times
        return {"owner": session.owner, "total": session.total}

    @tool("The total in words.")
    async def total(self, session: Account) -> str:
        return f"{session.total} für {session.owner}"

    @tool("Raises.")
    async def fail(self, session: Account) -> str:
        raise ValueError('no such "thing"')

    @tool("Never returns.")
    async def hang(self, session: Account) -> str:
        await asyncio.sleep(3600)
        return ""

    @tool("Loses its sandbox.")
    async def crash(self, session: Account) -> str:
        raise SandboxDown("the sandbox is gone")

    async def verify(self, session: Account, row: TaskRow, response: dict[str, Any]) -> Verdict:
        reward = session.total / 10
        match row.get("verdict"):
            case "raises":
                raise RuntimeError("cannot judge")
            case "infra":
                raise SandboxDown("the judge is gone")
            case "nan":
                return Verdict(float("nan"))
            case "text":
                return Verdict("1.0")  # type: ignore[arg-type]
            case "bool":
                return Verdict(True)
            case "right":
                return Verdict(1.0)
            case "nothing":
                return None  # type: ignore[return-value]
            case "wrong sum":
                return Verdict(1.0, {"form": 0.5, "content": 0.4})
            case "mask":
                return Verdict(reward, mask=True)
        parts = {"sum": reward, "form": 0.0}
        return Verdict(reward, parts, {"words": float(len(final_text(response).split())), "status": _status(response)})


def _status(response: dict[str, Any]) -> float:
    return float(response["status"] == "completed")


def counter_row(task_id: str = "t", **fields: Any) -> TaskRow:
    return task_row("Add things up.", task_id=task_id, tools=Counter().tool_schemas(), **fields)
