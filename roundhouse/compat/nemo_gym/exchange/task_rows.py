"""From task rows to one row a rollout: the materialized inputs of a collection. Pure, but for reading the file.

Invariants: two rows of one collection differ in (`_ng_task_index`, `_ng_rollout_index`); lines with the same text are one task,
unless they carry an index; nothing of a row is changed but what was asked for. All lines at fault are told together.

    a b c, 2 repeats  ->  a/0 a/1 b/0 b/1 c/0 c/1

Prompt configurations: templates that make a row's conversation out of its fields.

Invariant: a row has its own input or a template makes it, never both; a placeholder that names no field of the row is refused
with the line.

    {system: "Be brief.", user: "{question} Options: {options[0]}"}      {{ and }} stand for braces
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import fsspec
import orjson
import yaml

from roundhouse.compat.nemo_gym.exchange.json_lines import Row, iter_lines
from roundhouse.compat.nemo_gym.exchange.outgoing import is_index
from roundhouse.compat.nemo_gym.servers.aggregate import ROLLOUT, TASK
from roundhouse.config.yaml_text import load_yaml
from roundhouse.environments.task_files import parsed_row
from roundhouse.errors import ConfigError, DataError

DEFAULT = "_default"
"""Name in a table of repeats that stands for every other agent."""
MOST_SHOWN = 10
"""Lines at fault that are quoted in an error."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many rollouts a row gets: one number for all, or by agent."""

    all: int | None = 1
    by_agent: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Repeats:
        """From 4, None (1), or {agent: 4, _default: 1}.

        Raises:
            ConfigError: it is none of these, or a number is below 1.
        """
        if value is None:
            return cls()
        if isinstance(value, Mapping) and value and all(map(_is_count, value.values())):
            return cls(None, dict(value))
        if _is_count(value):
            return cls(value)
        raise ConfigError(
            f"num_repeats is {value!r}: give a whole number from 1, or {{agent: number, {DEFAULT}: number}}."
        )

    def of_agent(self, name: str) -> int:
        """
        Raises:
            DataError: the table has neither the agent nor a default.
        """
        count = self.all if self.all is not None else self.by_agent.get(name, self.by_agent.get(DEFAULT))
        if count is None:
            raise DataError(
                f"num_repeats names neither the agent {name!r} nor {DEFAULT}; it has {', '.join(self.by_agent)}."
            )
        return count


@dataclass(frozen=True, slots=True)
class Materialization:
    """What is done to the rows of a file."""

    agent: str | None = None
    """For rows that name none."""
    limit: int | None = None
    """Rows to take."""
    repeats: Repeats = Repeats()
    add_seed: bool = False
    """Ask the engine for seed = rollout index, by `metadata.extra_body`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Replaces fields of `responses_create_params`."""
    prompt: PromptTemplate | None = None


def materialize(uri: str, how: Materialization) -> list[Row]:
    """The rows of a file, one for each rollout.

    Raises:
        DataError: it cannot be read, holds no row, or has lines at fault; the text names them.
    """
    lines = iter_lines(uri)
    rows = expanded(islice(lines, how.limit), how, uri)
    if not rows:
        raise DataError(f"{uri} holds no task rows: one JSON object a line is needed.")
    return rows


def expanded(lines: Iterable[tuple[int, bytes]], how: Materialization, name: str) -> list[Row]:
    """The rows of numbered lines of the file `name`, one for each rollout."""
    tasks: dict[bytes, int] = {}
    given: Counter[Any] = Counter()
    faults: list[str] = []
    rows: list[Row] = []
    for number, line in lines:
        try:
            row, repeats = _prepared(line, how, f"{name}, line {number}")
        except DataError as error:
            faults.append(str(error))
            continue
        if TASK not in row:
            row[TASK] = tasks.setdefault(line.rstrip(b"\r\n"), len(tasks))
        for _ in range(repeats):
            rows.append(_repetition(row, given[row[TASK]], how.add_seed))
            given[row[TASK]] += 1
    if faults:
        more = f"\n  … and {len(faults) - MOST_SHOWN} more" if len(faults) > MOST_SHOWN else ""
        shown = "".join(f"\n  {fault}" for fault in faults[:MOST_SHOWN])
        raise DataError(f"{len(faults)} line(s) of {name} are no task rows:{shown}{more}")
    return rows


def _prepared(line: bytes, how: Materialization, where: str) -> tuple[Row, int]:
    """A line's row with all but its rollout index, and how often it is repeated."""
    row = parsed_row(line, where, needs_input=how.prompt is None)
    if how.prompt is not None:
        row = how.prompt.applied(row, where)
    if how.agent is not None:
        row.setdefault("agent_ref", {"name": how.agent})
    agent = row.get("agent_ref")
    if not isinstance(agent, dict) or not isinstance(agent.get("name"), str):
        raise DataError(f"{where} names no agent: name one for all rows, or put agent_ref.name into it.")
    if TASK in row and not is_index(row[TASK]):
        raise DataError(f"{where} has {TASK} {row[TASK]!r}; it is a whole number from 0, or left out.")
    row["responses_create_params"] = row["responses_create_params"] | how.params
    return row, how.repeats.of_agent(agent["name"])


def _repetition(row: Row, rollout_index: int, add_seed: bool) -> Row:
    copy = row | {ROLLOUT: rollout_index}
    if add_seed:
        params = row["responses_create_params"]
        metadata = params.get("metadata") or {}
        body = orjson.loads(metadata.get("extra_body") or "{}") | {"seed": rollout_index}
        copy["responses_create_params"] = params | {"metadata": metadata | {"extra_body": orjson.dumps(body).decode()}}
    return copy


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The templates of a prompt configuration."""

    user: str
    system: str | None = None

    def applied(self, row: Row, where: str) -> Row:
        """A copy of the row with `responses_create_params.input` made; its other parameters stay.

        Raises:
            DataError: the row has an input already, or lacks a field.
        """
        params = row.get("responses_create_params") or {}
        if not isinstance(params, dict) or params.get("input"):
            raise DataError(
                f"{where} has responses_create_params.input already; a prompt configuration would replace it."
            )
        messages = [
            {"role": role, "content": _filled(template, row, where)}
            for role, template in (("system", self.system), ("user", self.user))
            if template is not None
        ]
        return row | {"responses_create_params": params | {"input": messages}}


def read_prompt(uri: str) -> PromptTemplate:
    """Read a prompt configuration (YAML).

    Raises:
        ConfigError: it cannot be read, or is not {user: text, system?: text}.
    """
    try:
        with fsspec.open(uri, "r") as file:
            found: Any = load_yaml(file.read())
    except (OSError, ValueError, ImportError, yaml.YAMLError) as error:
        raise ConfigError(f"The prompt configuration {uri} cannot be read: {error}") from error
    known = isinstance(found, dict) and isinstance(found.get("user"), str)
    if not known or not isinstance(found.get("system"), str | None):
        raise ConfigError(f"The prompt configuration {uri} needs `user`, a text, and may have `system`, a text.")
    return PromptTemplate(found["user"], found.get("system"))


def _filled(template: str, row: Row, where: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise DataError(f"{where}: the prompt names the field {error}; the row has {', '.join(row)}.") from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            f"{where}: the prompt {template!r} cannot be filled: {error}. Braces are doubled: {{{{."
        ) from error
