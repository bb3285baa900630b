"""YAML as configuration files have it.

Invariant: a text is read whole or refused, in time and memory bounded by its length: no key silently replaces another, and
neither nesting nor aliases make it larger than `MAX_NODES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from roundhouse.errors import ConfigError

MAX_DEPTH = 100
"""Levels of nesting; PyYAML and pydantic recurse, and Python ends that at about a thousand calls."""
MAX_NODES = 100_000
"""Keys, values and collections, those that aliases repeat included: eight levels of nine aliases would be 43 million."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with duplicate keys, self-references and expansion without bound refused."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        self._sizes: dict[str, int] = {}
        """Nodes below each anchor that is complete."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        begun, line, anchor = self._nodes, event.start_mark.line + 1, getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in self.anchors and anchor not in self._sizes:
                raise yaml.YAMLError(f"the alias *{anchor} in line {line} stands inside of what it names")
            self._nodes += self._sizes.get(anchor or "", 0)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise yaml.YAMLError(
                f"by line {line} it has more than {MAX_NODES} values, those that aliases repeat included"
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"line {line} is nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[anchor] = self._nodes - begun
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


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: no YAML, a key given twice, too deep, too large, or a value that is none, such as the 31st of February.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except ValueError as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    finally:
        loader.dispose()


def read_yaml(file: Path, prepare: Callable[[str], str] = str) -> Any:
    """The value of a YAML file, whose text goes through `prepare` first.

    Raises:
        ConfigError: it cannot be read, or is no YAML that `load_yaml` takes.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        at = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise ConfigError(f"{file} is not UTF-8 text: {at}. Save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        return load_yaml(prepare(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {str(error).rstrip('.')}.") from error
