"""From the parameters of a request to conditions in SQL; pure.

Invariant: what a person types becomes a bound value, never a piece of the statement. Names of columns come from here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roundhouse.view.scope import ViewError

SORTS = (
    "iteration", "group_id", "sample", "environment", "status", "reward", "advantage", "turns", "generated_tokens",
    "total_tokens", "seconds", "started_at", "policy_version", "finish_reason", "reason",
)  # fmt: skip
"""Columns that a table can be sorted by."""

_EQUAL = {
    "environment": "environment",
    "status": "status",
    "group": "group_id",
    "reason": "reason",
    "code": "failure_code",
}
_LEARNING = {
    "trained": "advantage <> 0",
    "collapsed": "(iteration, group_id) IN "
    "(SELECT iteration, group_id FROM rollouts GROUP BY ALL HAVING max(abs(advantage)) = 0)",
    "refused": "reason IS NOT NULL",
}
"""What became of a rollout: it moved the policy; it could not, since its group's rewards were all the same (a collapsed
group); or validation kept it from training."""
_RANGES = {"reward": "reward", "tokens": "generated_tokens", "turns": "turns"}
LARGEST_PAGE = 500


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions on the rows of an index, and their order."""

    conditions: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    search: str = ""
    """Text to be found in task or conversation."""
    order: str = "iteration, group_id, sample"
    offset: int = 0
    limit: int = 200

    @property
    def where(self) -> str:
        return " AND ".join(self.conditions) or "true"

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Filters:
        """`environment`, `status`, `group`, `reason`, `code` (several with commas), `learning`, `reward_min`, `reward_max`, …
        `q`, `sort` (`-reward` descends), `offset`, `limit`.

        Raises:
            ViewError: a value cannot be understood.
        """
        made = _Conditions()
        for name, column in _EQUAL.items():
            if wanted := parameters.get(name):
                choices = wanted.split(",") if name not in ("group",) else [wanted]
                made.add(f"{column} IN ({', '.join('?' * len(choices))})", *choices)
        if learning := parameters.get("learning"):
            if learning not in _LEARNING:
                raise ViewError(f"learning={learning!r} is none of {', '.join(_LEARNING)}.")
            made.add(_LEARNING[learning])
        for name, column in _RANGES.items():
            for end, sign in (("min", ">="), ("max", "<=")):
                if text := parameters.get(f"{name}_{end}"):
                    made.add(f"{column} {sign} ?", _number(f"{name}_{end}", text))
        return cls(
            tuple(made.conditions),
            tuple(made.values),
            parameters.get("q", "").strip(),
            _order(parameters.get("sort", "")),
            int(_number("offset", parameters.get("offset", "0"))),
            min(int(_number("limit", parameters.get("limit", "200"))), LARGEST_PAGE),
        )


@dataclass(slots=True)
class _Conditions:
    conditions: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, condition: str, *values: Any) -> None:
        self.conditions.append(condition)
        self.values += values


def spellings(text: str) -> list[str]:
    """How a text may stand in the stored JSON: plain, as a JSON string, and as one inside a JSON string (tool arguments)."""
    once = json.dumps(text.lower(), ensure_ascii=False)[1:-1]
    return sorted({once, json.dumps(once, ensure_ascii=False)[1:-1]})


def _order(sort: str) -> str:
    column = sort.removeprefix("-")
    if not column:
        return "iteration, group_id, sample"
    if column not in SORTS:
        raise ViewError(f"sort={sort!r}: there is no such column. There are: {', '.join(SORTS)}.")
    return f"{column} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, iteration, group_id, sample"


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ViewError(f"{name}={text!r} is not a number.") from None
    if not (abs(number) < 1e15 and (number >= 0 or name not in ("offset", "limit"))):
        raise ViewError(f"{name}={text!r} is out of range.")
    return number
