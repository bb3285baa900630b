"""Functions that score rollouts, of a rubric or of a program. Processes of user code import this module alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundhouse.environments.base import TaskRow, Verdict

if TYPE_CHECKING:
    from roundhouse.plugins.programs.command import CommandOutcome


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


def leave_a_process(task: TaskRow, outcome: CommandOutcome) -> float:
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    Path(os.environ["KEPT"]).write_text(str(child))
    return 1.0


def write_into_every_descriptor_once(task: TaskRow, outcome: CommandOutcome) -> float:
    try:
        Path(os.environ["KEPT"]).touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
        try:
            os.write(descriptor, b"from user code")
        except OSError:
            continue
    return 1.0
