"""Functions that score rollouts, of a rubric or of a program. Processes of user code import this module alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundhouse.environments.base import TaskRow, Verdict

if TYPE_CHECKING:
    from roundhouse.compat.command import CommandOutcome


def half(task: TaskRow, items: list[dict[str, Any]]) -> float:
    assert items[-1]["role"] == "assistant"
    return 0.5


def nothing_right(task: TaskRow, items: list[dict[str, Any]]) -> float:
    return 0.0


async def truth(task: TaskRow, items: list[dict[str, Any]]) -> bool:
    return True


def raises(task: TaskRow, items: list[dict[str, Any]]) -> float:
    raise RuntimeError("no opinion")


def too_much(task: TaskRow, items: list[dict[str, Any]]) -> float:
    return 7.0


def judge(task: TaskRow, outcome: CommandOutcome) -> float:
    return float(task["answer"] == outcome.reply == outcome.output.strip())


async def judge_and_mask(task: TaskRow, outcome: CommandOutcome) -> Verdict:
    return Verdict(0.5, mask=True)


def judge_badly(task: TaskRow, outcome: CommandOutcome) -> float:
    raise RuntimeError("no opinion")


def keep_output(task: TaskRow, outcome: CommandOutcome) -> float:
    Path(os.environ["KEPT"]).write_text(outcome.output)
    return 0.0
