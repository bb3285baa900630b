"""Collected datasets, as the viewer shows them: a dataset stands beside the runs, and its versions stand for iterations.

Invariant: the number of a version follows from its name, so that a link to it stays right while other versions come and go.

    datasets/nightly    20261121T020000Z-v000012    number 29728440: the minute
    datasets/offline    v000005-i000101             number 500101: version and draw
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime

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
