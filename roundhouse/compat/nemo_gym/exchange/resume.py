"""What a collection still has to do: a pure difference of wanted and done.

Invariant: a rollout that was written is not made again; one that failed for good, or as often as is allowed, is not tried
again; everything else is.

    wanted a/0 a/1 b/0 b/1, rollouts a/0, failures a/1 (3 times) b/0 (terminal) b/1 (once)
        ->  to run b/1, its `_ng_attempt_index` 1
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roundhouse.compat.nemo_gym.exchange.json_lines import Row
from roundhouse.compat.nemo_gym.exchange.outgoing import ATTEMPT, is_index
from roundhouse.compat.nemo_gym.servers.aggregate import ROLLOUT, TASK
from roundhouse.errors import ConfigError
from roundhouse.rollout.failures import TERMINAL

MAX_ATTEMPTS = 3
MAX_ATTEMPTS_VARIABLE = "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS"

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rows to run, and why the others are not."""

    rows: list[Row]
    done: int = 0
    terminal: int = 0
    """Failed for good."""
    exhausted: int = 0
    """Failed as often as is allowed."""


def remaining(
    wanted: Sequence[Row], done: Iterable[Row], failures: Iterable[Row], max_attempts: int = MAX_ATTEMPTS
) -> Remaining:
    """What of `wanted` (materialized inputs) is still to be run; failed rows get the number of their next attempt."""
    finished = {key_of(row) for row in done}
    attempts: Counter[Key] = Counter()
    terminal: set[Key] = set()
    for row in failures:
        if is_index(row.get(TASK)) and is_index(row.get(ROLLOUT)):
            attempts[key_of(row)] += 1
            if row.get(TERMINAL):
                terminal.add(key_of(row))
    rows = []
    counts: Counter[str] = Counter()
    for row in wanted:
        key = key_of(row)
        tried = attempts[key]
        if key in finished:
            counts["done"] += 1
        elif key in terminal:
            counts["terminal"] += 1
        elif tried >= max_attempts:
            counts["exhausted"] += 1
        else:
            rows.append(row | {ATTEMPT: tried} if tried else row)
    return Remaining(rows, counts["done"], counts["terminal"], counts["exhausted"])


def key_of(row: Row) -> Key:
    return row[TASK], row[ROLLOUT]


def max_attempts(environ: Mapping[str, str] = os.environ) -> int:
    """Attempts at a rollout, over all resumes, as NEMO_GYM_MAX_ROLLOUT_ATTEMPTS says; 3 when it is unset.

    Raises:
        ConfigError: it is no whole number from 1.
    """
    text = environ.get(MAX_ATTEMPTS_VARIABLE) or str(MAX_ATTEMPTS)
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{MAX_ATTEMPTS_VARIABLE} is {text!r}: give a whole number from 1, or unset it.")
    return int(text)
