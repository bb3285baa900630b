"""Ids of tasks: those of the rows themselves, and generated ones for rows without an id.

Invariant: a generated id never equals an id that a user gave. It is a pure function of the rows: a later start generates the
same ids.

    ids a, none, line-2 on lines 1 to 3    ->    a, line-2#, line-2
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError


def unused_id(preferred: str, taken: Container[str]) -> str:
    """Return the preferred id, with `#` appended until it differs from all ids in `taken`."""
    while preferred in taken:
        preferred += "#"
    return preferred


def own_id(row: TaskRow, where: str) -> str | None:
    """Return the row's ID as text, or None.

    Args:
        where: names the row in the error, such as `tasks.jsonl, line 3`.

    Raises:
        ConfigError: the ID is empty, or neither a text nor a number.
    """
    task_id: Any = row.get("task_id")
    if task_id is None:
        return None
    if isinstance(task_id, bool) or not isinstance(task_id, str | int | float):
        raise ConfigError(f"{where}: task_id is {task_id!r:.80}, a {type(task_id).__name__}. Give a text or a number.")
    if not str(task_id).strip():
        raise ConfigError(f"{where}: task_id is empty. Give each row a distinct id, or remove the key.")
    return str(task_id)


def identified_rows(
    rows: Sequence[TaskRow], names: Sequence[str], generate: Callable[[int], str], key: str
) -> list[TaskRow]:
    """Return the rows with one distinct `task_id` each: their own, or a generated one.

    Args:
        names: of each row, its name in errors, such as `line 3`.
        generate: the preferred id of the row at an index.
        key: the configuration key and the file, for errors.

    Raises:
        ConfigError: an id is empty or of a wrong type, or two rows have the same.
    """
    ids = [own_id(row, f"{key}, {name}") for row, name in zip(rows, names, strict=True)]
    places: dict[str, str] = {}
    for task_id, name in zip(ids, names, strict=True):
        if task_id is None:
            continue
        if task_id in places:
            raise ConfigError(f"{key}, {name}: task_id {task_id!r} is already used on {places[task_id]}.")
        places[task_id] = name
    identified = []
    for index, (row, task_id) in enumerate(zip(rows, ids, strict=True)):
        identified.append({**row, "task_id": unused_id(generate(index), places) if task_id is None else task_id})
    return identified
