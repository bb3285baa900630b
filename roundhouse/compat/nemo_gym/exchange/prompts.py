"""Prompt configurations: templates that make a row's conversation out of its fields.

Invariant: a row has its own input or a template makes it, never both; a placeholder that names no field of the row is refused
with the line.

    {system: "Be brief.", user: "{question} Options: {options[0]}"}      {{ and }} stand for braces
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fsspec
import yaml

from roundhouse.compat.nemo_gym.exchange.json_lines import Row
from roundhouse.config.yaml_text import load_yaml
from roundhouse.errors import ConfigError, DataError


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
