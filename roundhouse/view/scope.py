"""What is looked at: the rollouts of one stage of one iteration, or of all iterations of a run, and the filters on them.

A collected dataset takes the place of a run in the menu, and its versions that of iterations. Invariant: what a person types is
a parameter of a statement, never part of its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from roundhouse.errors import RoundhouseError, StoreError

ROLLOUT_STAGES = ("collect", "evaluate")
"""Stages that hold rollouts. What was collected goes on to validate and train; what was evaluated does not."""


class ViewError(RoundhouseError):
    """A request that cannot be answered; the text says what there is instead."""


class Missing(ViewError, StoreError):
    """The store has no such run, dataset, version or iteration."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One stage of an iteration, or of all of them."""

    run_id: str
    iteration: int | None
    """None: all iterations of the run."""
    stage: Literal["collect", "evaluate"]

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages whose datasets say something about these rollouts. A dataset is only collected."""
        if is_dataset(self.run_id):
            return ("collect",)
        return ("collect", "validate", "train") if self.stage == "collect" else ("evaluate",)

    @classmethod
    def of(cls, parameters: Mapping[str, str], prefix: str = "") -> Scope:
        """From the parameters of a request: `run`, `iteration` (a number or `all`) and `stage`.

        Raises:
            ViewError: one is missing or impossible.
        """
        run_id = parameters.get(f"{prefix}run", "")
        if not run_id:
            raise ViewError(f"{prefix}run is missing: name a run.")
        stage = parameters.get(f"{prefix}stage", "collect")
        if stage not in ROLLOUT_STAGES:
            raise ViewError(f"{prefix}stage={stage!r} holds no rollouts: {' or '.join(ROLLOUT_STAGES)}.")
        if is_dataset(run_id) and stage != "collect":
            raise ViewError(f"{prefix}stage={stage}: a dataset has no evaluations. Leave it out.")
        iteration = parameters.get(f"{prefix}iteration", "all")
        if iteration != "all" and not iteration.isdecimal():
            raise ViewError(f"{prefix}iteration={iteration!r} is neither a number nor 'all'.")
        return cls(
            run_id, None if iteration == "all" else int(iteration), "evaluate" if stage == "evaluate" else "collect"
        )


PREFIX = "datasets/"
"""Of the name under which a dataset stands among the runs; no run id has a slash."""
LARGEST = 2**31 - 1

_MOMENT = re.compile(r"(\d{8}T\d{6}Z)-v\d+")
_DRAW = re.compile(r"v(\d+)-i(\d+)")


def is_dataset(run_id: str) -> bool:
    return run_id.startswith(PREFIX)


def numbered(labels: Iterable[str]) -> dict[int, str]:
    """The versions by number, ascending; names that are no version's are left out."""
    found: dict[int, str] = {}
    for label in sorted(labels):
        number = _number(label)
        while number is not None and number in found:  # as of two draws of one number beyond 100,000
            number += 1
        if number is not None:
            found[number] = label
    return dict(sorted(found.items()))


def _number(label: str) -> int | None:
    if (match := _MOMENT.fullmatch(label)) is not None:
        moment = datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return int(moment.timestamp()) // 60
    if (match := _DRAW.fullmatch(label)) is not None:
        return (int(match[1]) * 100_000 + int(match[2])) % LARGEST
    return None


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
                    made.add(f"{column} {sign} ?", _limit_of(f"{name}_{end}", text))
        return cls(
            tuple(made.conditions),
            tuple(made.values),
            parameters.get("q", "").strip(),
            _order(parameters.get("sort", "")),
            int(_limit_of("offset", parameters.get("offset", "0"))),
            min(int(_limit_of("limit", parameters.get("limit", "200"))), LARGEST_PAGE),
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


def _limit_of(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ViewError(f"{name}={text!r} is not a number.") from None
    if not (abs(number) < 1e15 and (number >= 0 or name not in ("offset", "limit"))):
        raise ViewError(f"{name}={text!r} is out of range.")
    return number
