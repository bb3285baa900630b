"""Task rows from JSON lines files.

Invariant: each row that comes out has a `task_id` of its own in its file and parameters that a `/v1/responses` call would be
accepted with; the first line at fault is named.
"""

from __future__ import annotations

import fsspec
import orjson

from roundhouse.environments.base import TaskRow
from roundhouse.environments.openai_requests import InvalidRequest, check_responses
from roundhouse.errors import ConfigError, DataError

PARAMS = "responses_create_params"


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


def parsed_row(line: bytes, where: str, *, needs_input: bool = True) -> TaskRow:
    """The task row on a line; `where` names it in errors.

    Args:
        needs_input: False where a prompt configuration makes the input afterwards.

    Raises:
        DataError: it is no JSON object, or its parameters are not those of a `/v1/responses` call.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a {type(row).__name__}; a task row is a JSON object.")
    params = row.get(PARAMS)
    if not needs_input:
        params = {"input": [], **(params or {})} if isinstance(params, dict | None) else params
    if not isinstance(params, dict) or "input" not in params:
        raise DataError(f"{where}: a task row needs {PARAMS}.input, a text or a list of items.")
    try:
        check_responses(params)
    except InvalidRequest as error:
        raise DataError(f"{where}: {PARAMS}: {error}") from error
    return row


def _task_row(line: bytes, number: int, where: str) -> TaskRow:
    try:
        row = parsed_row(line, where)
    except DataError as error:
        raise ConfigError(str(error)) from error
    task_id = row.get("task_id")
    return {**row, "task_id": f"line-{number}" if task_id is None else str(task_id)}
