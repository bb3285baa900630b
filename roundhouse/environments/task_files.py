"""Task rows from JSON lines files.

Invariant: each row has a unique `task_id` in its file and parameters that a `/v1/responses` call would be accepted with; the
first line at fault is named.
"""

from __future__ import annotations

from typing import Protocol

from roundhouse.environments.base import TaskRow
from roundhouse.environments.null_fields import tools_of_row
from roundhouse.environments.task_ids import identified_rows
from roundhouse.errors import ConfigError, DataError
from roundhouse.generation.protocol import InvalidRequest, check_responses
from roundhouse.text_files import iter_lines, parse_json

PARAMS = "responses_create_params"


class HasTaskFiles(Protocol):
    """The configuration of an environment with task rows in files."""

    @property
    def train_tasks(self) -> str | None: ...

    @property
    def heldout_tasks(self) -> str | None: ...


def read_task_rows(uri: str, key: str) -> list[TaskRow]:
    """Return the rows of a file, local or of any fsspec scheme. A row without `task_id` gets `line-<number>`.

    Raises:
        ConfigError: unreadable file, a line without a task row, an empty or repeated `task_id`. `key` names the configuration
            key.
    """
    try:
        lines = list(iter_lines(uri))
    except DataError as error:
        raise ConfigError(f"{key} is {uri!r}: {error}") from error
    rows: list[TaskRow] = []
    for number, line in lines:
        try:
            rows.append(parsed_row(line, f"{key}: {uri}, line {number}"))
        except DataError as error:
            raise ConfigError(str(error)) from error
    if not rows:
        raise ConfigError(f"{key} is {uri!r}, which holds no task rows: one JSON object a line is needed.")
    numbers = [number for number, _ in lines]
    names = [f"line {number}" for number in numbers]
    return identified_rows(rows, names, lambda index: f"line-{numbers[index]}", f"{key}: {uri}")


def read_split_rows(config: HasTaskFiles) -> tuple[list[TaskRow], list[TaskRow]]:
    """The rows of a configuration's `train_tasks` and of its `heldout_tasks`; none of a file that it does not name.

    Raises:
        ConfigError: as `read_task_rows`.
    """
    train = read_task_rows(config.train_tasks, "environment.train_tasks") if config.train_tasks else []
    return train, (read_task_rows(config.heldout_tasks, "environment.heldout_tasks") if config.heldout_tasks else [])


def parsed_row(line: bytes, where: str, *, needs_input: bool = True) -> TaskRow:
    """Return the task row on a line; `where` names it in errors.

    Args:
        needs_input: False if a prompt configuration makes the input afterwards.

    Raises:
        DataError: it is not a JSON object, or its parameters are not those of a `/v1/responses` call.
    """
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise DataError(f"{where} is a {type(row).__name__}; a task row is a JSON object.")
    params = row.get(PARAMS)
    if not needs_input:
        params = {"input": [], **(params or {})} if isinstance(params, dict | None) else params
    if not isinstance(params, dict) or "input" not in params:
        raise DataError(f"{where}: a task row needs {PARAMS}.input, a text or a list of items.")
    try:
        if params.get("tools") is not None:
            params = params | {"tools": tools_of_row(params["tools"])}
            row = row | {PARAMS: params}
        check_responses(params)
    except (InvalidRequest, DataError) as error:
        raise DataError(f"{where}: {PARAMS}: {error}") from error
    return row
