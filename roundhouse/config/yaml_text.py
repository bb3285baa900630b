"""YAML as configuration files have it, and the patterns of keys in words for error messages.

Invariant: a text is read whole or refused, in time and memory bounded by its length: no key silently replaces another, and
neither nesting nor aliases make it larger than `MAX_NODES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from roundhouse.errors import ConfigError, DataError
from roundhouse.text_files import decode_text

MAX_DEPTH = 100
"""Levels of nesting; PyYAML and pydantic recurse, and Python ends that at about a thousand calls."""
MAX_NODES = 100_000
"""Limit of keys, values and collections, including repetitions by aliases: eight levels of nine aliases would be 43
million."""
MAX_DIGITS = 4300
"""Longest whole number, as Python reads it from text."""
Variable = Callable[[str, str | None], str]
"""Function that returns the text of a variable, from its name and the text after `:-`, if any."""
_VARIABLE = re.compile(r"\$\{\w+(?::-(?:(?:\{[^{}]*\}|[^{}\n])*(?=\})|[^}]*))?\}")
"""A default may hold pairs of braces; one with unpaired braces in its line ends at the first closing one."""
_HIDE = {ord(sign): 0xE000 + ord(sign) for sign in "${}[],:?#"}
"""Characters that would end a scalar or begin another node, as private ones, so that a variable is always part of its
scalar."""
_SHOW = {hidden: sign for sign, hidden in _HIDE.items()}
_HIDDEN = re.compile(
    "\ue024\ue07b(\\w+)(?:\ue03a-((?:\ue07b[^\ue07b\ue07d]*\ue07d|[^\ue07b\ue07d\n])*(?=\ue07d)|[^\ue07d]*))?\ue07d"
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with duplicate keys, self-references and expansion without bound refused, and with variables."""

    def __init__(self, text: str, variable: Variable | None) -> None:
        super().__init__(_VARIABLE.sub(lambda found: found[0].translate(_HIDE), text) if variable else text)
        self._variable = variable
        self._depth = self._nodes = 0
        self._sizes: dict[str, int] = {}
        """Nodes below each anchor that is complete."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        first_node, line, anchor = self._nodes, event.start_mark.line + 1, getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in self.anchors and anchor not in self._sizes:
                raise yaml.YAMLError(f"the alias *{anchor} in line {line} is inside of its own anchor")
            self._nodes += self._sizes.get(anchor or "", 0)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise yaml.YAMLError(f"by line {line} it has more than {MAX_NODES} values, repeated aliases included")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"line {line} is nested more than {MAX_DEPTH} levels deep")
        expanded = self._expand(event, line) if isinstance(event, yaml.ScalarEvent) else None
        node = super().compose_node(parent, index)
        if expanded is not None:
            node = expanded
            if anchor is not None:
                self.anchors[anchor] = expanded
        self._depth -= 1
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[anchor] = self._nodes - first_node
        return node

    def _expand(self, event: yaml.ScalarEvent, line: int) -> yaml.Node | None:
        """Insert the texts of its variables into a scalar. A variable that is the whole scalar may hold a list, a
        mapping or quoted text."""
        variable = self._variable
        if variable is None or not _HIDDEN.search(event.value):
            return None
        alone, plain = _HIDDEN.fullmatch(event.value), event.implicit[0]
        event.value = _HIDDEN.sub(lambda found: variable(found[1], found[2] and found[2].translate(_SHOW)), event.value)
        if not plain:
            return None
        event.value = event.value.strip()
        if not alone or event.value[:1] + event.value[-1:] not in ("[]", "{}", "''", '""'):
            return None
        inner = _Loader(event.value, None)
        inner._depth, inner._nodes = self._depth, self._nodes
        try:
            node = inner.get_single_node()
        except yaml.YAMLError as error:
            raise yaml.YAMLError(f"what the variable in line {line} holds cannot be read: {error}") from error
        finally:
            inner.dispose()
        self._nodes = inner._nodes
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(
                    f"the key {key.value!r} is given twice, in line {lines[name]} and in line {line}, and one would replace "
                    "the other. Keep one"
                )
            lines[name] = line
        return node


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MAX_DIGITS:  # PyYAML's time for base 60 (59:59:59) grows with the square of the length
        raise ValueError(f"a number of {len(node.value)} digits")
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def load_yaml(text: str, variable: Variable | None = None) -> Any:
    """Parse a YAML text; `variable` resolves `${NAME}` and `${NAME:-default}` in its scalars.

    A variable is text of its scalar, whatever it holds. An unquoted scalar is then read as a number, null, … if it is
    one, and as a list, a mapping or quoted text if one variable is all of it.

    Raises:
        yaml.YAMLError: invalid YAML, a key given twice, too deep, too large, or an invalid value, such as the 31st of
        February.
    """
    loader = _Loader(text, variable)
    try:
        return loader.get_single_data()
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:  # PyYAML's own, of odd tags
        raise yaml.YAMLError(f"a value cannot be read: {error!r}") from error
    finally:
        loader.dispose()


def read_yaml(file: Path, variable: Variable | None = None) -> Any:
    """Parse a YAML file as `load_yaml` does.

    Raises:
        ConfigError: it cannot be read, or is not valid YAML for `load_yaml`.
    """
    try:
        text = decode_text(file.read_bytes(), str(file))
    except DataError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        return load_yaml(text, variable)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {str(error).translate(_SHOW).rstrip('.')}.") from error


_IN_WORDS = {  # each pattern of a key or form field, because an expression is not a remedy; a test checks all schemas
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "small letters, digits, '.', '_' and '-', beginning with a letter or digit; at most 63",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$": "letters, digits, '.', '_' and '-', beginning with a letter or digit; at most 63",
    r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$": (
        "letters, digits, spaces, '.', '_' and '-', beginning with a letter or digit; at most 100"
    ),
    r"^(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+$": "an absolute path of letters, digits, '.', '_' and '-', such as /app",
    r"^[A-Za-z0-9:/._@=-]+$": "a dataset's name, <name>@<version>, <name>@all, or a path, without spaces",
    r"^[A-Za-z0-9]+([-_][A-Za-z0-9]+)*$": "letters and digits, parted by single '-' or '_'",
    r"^[A-Za-z_][A-Za-z0-9_]{0,99}$": "the name of an environment variable: letters, digits and '_', no digit first",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "the name of an environment variable: letters, digits and '_', no digit first",
    r"^(?:[\w.]+|.+\.py):[\w.]+$": "module:Class, or path/to/file.py:Class",
    r"^\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$": "a quantity as Kubernetes has it: 500m, 2, 4Gi",
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$": "small letters, digits and '-', no '-' first or last; at most 63",
    r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$": (
        "letters, digits, '.', '_' and '-', beginning and ending with a letter or digit; at most 63"
    ),
    r"^[a-z]([a-z0-9_-]{0,61}[a-z0-9])?$": (
        "small letters, digits, '_' and '-', beginning with a letter and ending with a letter or digit; at most 63"
    ),
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$": "small letters, digits, '.' and '-', none of the two first or last; at most 253",
    r"^[a-z0-9]+(\+[a-z0-9]+)?://": "a database's address with its driver, such as postgresql+asyncpg://…",
    r"^https?://\S+$": "an address that begins with http:// or https://",
    r"^https?://[^/]+": "an address that begins with http:// or https://",
    r"^https?://[^/\s]+": "an address that begins with http:// or https://",
    r"^/[\w./-]+$": "a path that begins with /: letters, digits, '.', '_', '/' and '-'",
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?Z$": "a moment in UTC, such as 2026-11-21T02:00:00Z",
    r"^(newest|promoted|\d+)$": "newest, promoted, or the number of a version",
}


def in_words(pattern: str) -> str:
    """Describe the required form of a value.

    >>> in_words("^https?://[^/]+")
    'an address that begins with http:// or https://'
    """
    if pattern.startswith("^(run_id|"):  # of an override; it lists all sections
        return "key.path=value, with a key of a run's configuration"
    return _IN_WORDS.get(pattern, f"text that matches {pattern}")
