"""An environment, a loss and a store that take their time: `benchmarks/doctor.py` makes runs of them that hardly compute.

    WAITING_OPERATION_SECONDS=0.05 python -m benchmarks.waiting train run.yaml      # `roundhouse` with a slow store

Invariant: seconds are log-normal around a median and drawn from what they are for (the store's in turn), so that a change of
the run changes only how they overlap.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roundhouse import cli
from roundhouse.environments.base import TaskRow, Verdict, closing_text, tool
from roundhouse.environments.calculator import Calculator, Tally, answer_sentence
from roundhouse.store.location import Location
from roundhouse.training.algorithms import LossSettings
from roundhouse.training.loss import LossTokens, clipped_policy_loss

TOKEN_SECONDS = "WAITING_TOKEN_SECONDS"
OPERATION_SECONDS = "WAITING_OPERATION_SECONDS"
"""Environment variables: medians of the seconds that a trained token takes, and an operation of the store."""


def latency(median: float, sigma: float, about: object) -> float:
    """Seconds, log-normal, the same for the same event."""
    return median * math.exp(sigma * random.Random(str(about)).gauss(0, 1))


class SlowCalculator(Calculator):
    """The calculator behind a network: tools and verifier answer late."""

    def __init__(self, tool_seconds: float = 0.0, verify_seconds: float = 0.0, sigma: float = 0.6) -> None:
        super().__init__()
        self._tool_seconds, self._verify_seconds, self._sigma = tool_seconds, verify_seconds, sigma

    @tool("Calculate with one operator.", expression="Two whole numbers with one of + - * / between them.")
    async def calculate(self, session: Tally, expression: str) -> str:
        await asyncio.sleep(latency(self._tool_seconds, self._sigma, f"{expression} {session.calls}"))
        return await super().calculate(session, expression)

    async def verify(self, session: Tally, row: TaskRow, response: dict[str, Any]) -> Verdict:
        text = closing_text(response)
        await asyncio.sleep(latency(self._verify_seconds, self._sigma, f"{row['answer']} {text}"))
        return Verdict(float(text is not None and text.endswith(answer_sentence(int(row["answer"])))))


def waiting_loss(tokens: LossTokens, ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """The clipped loss of a trainer that takes so long for each token."""
    time.sleep(latency(float(os.environ[TOKEN_SECONDS]) * len(ratio), 0.1, float(ratio.detach().sum())))
    return clipped_policy_loss(ratio, tokens.advantages, settings)


def main() -> None:
    """`roundhouse` with a store whose every operation takes so long more."""
    median, at_once = float(os.environ[OPERATION_SECONDS]), Location._reported
    draws = random.Random(0)

    @contextmanager
    def late(self: Location, verb: str, name: str) -> Iterator[None]:
        with at_once(self, verb, name):
            time.sleep(latency(median, 0.4, draws.random()))
            yield

    if median:
        Location._reported = late  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
