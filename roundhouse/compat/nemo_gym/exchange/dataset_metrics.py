"""Numbers of a set of task rows, in the shape of NeMo Gym's `*_metrics.json`; no I/O.

Invariant: the statistics of several datasets together equal those of their rows in one: sums are kept, not averages.

    {"Number of examples": 2, "Number of tools": {"Total # non-null values": 2, "Average": 1.0, …}, …,
     "level": {…: …}, "subject": {"unique_count": 2, "total_count": 2}}
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from roundhouse.compat.nemo_gym.exchange.json_lines import Row

TOOLS, WORDS = "Number of tools", "Json-dumped number of words (proxy for token count)"
TURNS, TEMPERATURE = "Number of turns", "Temperature"


@dataclass(slots=True)
class Spread:
    """Average, extremes and deviation of a number; constant memory (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""
    least: float = math.inf
    most: float = -math.inf

    def observe(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)
        self.least, self.most = min(self.least, value), max(self.most, value)

    def shown(self) -> dict[str, float]:
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        numbers = {
            "Average": self.mean,
            "Min": self.least if self.count else 0.0,
            "Max": self.most if self.count else 0.0,
            "Standard deviation": deviation,
        }
        return {"Total # non-null values": self.count} | {name: _rounded(value) for name, value in numbers.items()}


@dataclass(slots=True)
class DatasetMetrics:
    """Takes rows one by one."""

    examples: int = 0
    spreads: dict[str, Spread] = field(
        default_factory=lambda: {name: Spread() for name in (TOOLS, WORDS, TURNS, TEMPERATURE)}
    )
    numbers: dict[str, Spread] = field(default_factory=dict)
    """Of the verifier's fields that hold numbers, or lists with numbers."""
    texts: dict[str, Counter[str]] = field(default_factory=dict)
    """Of those that hold texts."""

    def observe(self, row: Row, times: int = 1) -> None:
        """Take a row into account, as often as it is repeated."""
        for _ in range(times):
            self.examples += 1
            self._params(row["responses_create_params"])
            for name, value in row.items():
                if name not in ("responses_create_params", "response"):
                    self._field(name, value if isinstance(value, list) else [value])

    def shown(self) -> dict[str, Any]:
        """As the file has it."""
        fields = {name: spread.shown() for name, spread in self.numbers.items()}
        counts = {
            name: {"unique_count": len(found), "total_count": sum(found.values())} for name, found in self.texts.items()
        }
        return {
            "Number of examples": self.examples,
            **{name: spread.shown() for name, spread in self.spreads.items()},
            **fields,
            **counts,
        }

    def _params(self, params: Row) -> None:
        given = params.get("input")
        items = [{"role": "user"}] if isinstance(given, str) else given or []
        turns = sum(item.get("role") == "user" for item in items)
        tools, temperature = params.get("tools"), params.get("temperature")
        self.spreads[WORDS].observe(len(json.dumps(params).split()))
        for name, value in (
            (TOOLS, None if tools is None else len(tools)),
            (TURNS, turns or None),
            (TEMPERATURE, temperature),
        ):
            if value is not None:
                self.spreads[name].observe(value)

    def _field(self, name: str, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, int | float) and name not in self.texts:
                self.numbers.setdefault(name, Spread()).observe(value)
            elif isinstance(value, str) and name not in self.numbers:
                self.texts.setdefault(name, Counter())[value] += 1


def _rounded(value: float) -> float:
    return round(float(value), 2 if abs(value) >= 1 else 3)
