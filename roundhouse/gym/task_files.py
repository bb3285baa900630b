"""Task rows from JSON lines files.

Invariant: each row that comes out has a `task_id` of its own in its file and an object `responses_create_params`; the first
line at fault is named.
"""

from __future__ import annotations

import fsspec
import orjson

from roundhouse.errors import ConfigError
from roundhouse.gym.environment import TaskRow


def read_task_rows(uri: str, key: str) -> list[TaskRow]:
    """The rows of a file, local or of any fsspec scheme. A row without `task_id` gets `line-<number>`.

    Raises:
        ConfigError: unreadable file, a line that is no task row, a `task_id` used twice. `key` names the configuration key.
    """
    try:
        with fsspec.open(uri, "rb") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{key} is {uri!r}, which cannot be read: {error}") from error
    rows: list[TaskRow] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{key}: {uri}, line {number}"
        row = _task_row(line, number, where)
        if row["task_id"] in seen:
            raise ConfigError(f"{where}: task_id {row['task_id']!r} is already used on line {seen[row['task_id']]}.")
        seen[row["task_id"]] = number
        rows.append(row)
    if not rows:
        raise ConfigError(f"{key} is {uri!r}, which holds no task rows: one JSON object a line is needed.")
    return rows


def _task_row(line: bytes, number: int, where: str) -> TaskRow:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    params = row.get("responses_create_params") if isinstance(row, dict) else None
    if not isinstance(params, dict) or not isinstance(params.get("input"), str | list):
        raise ConfigError(f"{where}: a task row needs responses_create_params.input, a text or a list of items.")
    task_id = row.get("task_id")
    return {**row, "task_id": f"line-{number}" if task_id is None else str(task_id)}
