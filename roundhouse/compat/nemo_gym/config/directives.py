"""`_inherit_from`, `_copy` and `_delete_key`: parts of a configuration that are made from other parts.

Invariant: every source is read as it stood before any directive, with the directives inside it applied; so the order of keys
does not matter, and several targets may use one source. A source that is inherited is moved: it is gone from its old place.

    math: {_inherit_from: generic, host: a}     math: generic's values, then host: a; `generic` is removed
    judge: {_copy: policy}                      judge: policy's values; `policy` stays
    name: ${copy:policy.name}                   the same for a single value; ${inherit_from:a.b} moves it
    math: {_delete_key: "x, y"}                 math without x and y, also where they were inherited

Trees are plain containers: interpolations are texts, unset values are `???`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from roundhouse.errors import ConfigError

INHERIT, COPY, DELETE = "_inherit_from", "_copy", "_delete_key"
MISSING = "???"

_CALL = re.compile(r"\$\{(inherit_from|copy):\s*([^${}]+?)\s*\}")

Path = tuple[str, ...]


def apply_directives(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with all directives applied; `tree` itself stays as it is.

    Raises:
        ConfigError: a source does not exist or is made from its own target; a key to delete does not exist.
    """
    expansion = _Expansion(tree)
    result: dict[str, Any] = expansion.expand(tree, ())
    for path in sorted(expansion.moved, key=len, reverse=True):
        _remove(result, path)
    return result


class _Expansion:
    def __init__(self, original: dict[str, Any]) -> None:
        self._original = original
        self._open: list[str] = []
        """Sources that are being read, the outermost first."""
        self.moved: set[Path] = set()

    def expand(self, node: Any, where: Path) -> Any:
        if isinstance(node, dict):
            return self._mapping(node, where)
        if isinstance(node, list):
            return [self.expand(child, (*where, str(index))) for index, child in enumerate(node)]
        if isinstance(node, str) and (call := _CALL.fullmatch(node)):
            return self._source(call[2], where, moves=call[1] == "inherit_from")
        return node

    def _mapping(self, node: dict[str, Any], where: Path) -> Any:
        unwanted = _names(node.get(DELETE), where)
        own = {key: child for key, child in node.items() if key not in (INHERIT, COPY, DELETE) and key not in unwanted}
        expanded = {key: self.expand(child, (*where, str(key))) for key, child in own.items()}
        if INHERIT not in node and COPY not in node:
            return expanded
        named = node[INHERIT] if INHERIT in node else node[COPY]
        source = self._source(named, where, moves=INHERIT in node)
        if source == MISSING:
            return MISSING
        if not isinstance(source, dict):
            raise ConfigError(f"{'.'.join(where)} is made from {named!r}, which is no mapping.")
        made = merged(source, expanded)
        for key in sorted(unwanted - node.keys()):
            if key not in made:
                raise ConfigError(
                    f"{'.'.join(where)}.{DELETE} names {key!r}, which is not there; there are: {', '.join(made)}."
                )
            del made[key]
        return made

    def _source(self, dotted: Any, where: Path, *, moves: bool) -> Any:
        """The expanded value at a dotted path of the original tree."""
        name = ".".join(where)
        if not isinstance(dotted, str) or not dotted:
            raise ConfigError(f"{name} is made from {dotted!r}; give a dotted path.")
        if dotted in self._open:
            raise ConfigError(f"{name} is made from itself: {' <- '.join([*self._open, dotted])}.")
        path = tuple(dotted.split("."))
        if where[: len(path)] == path:
            raise ConfigError(f"{name} is made from {dotted!r}, which holds it.")
        node: Any = self._original
        for depth, key in enumerate(path):
            if node == MISSING:
                return MISSING
            node = self._member(node, key, path[:depth], lambda: f"{name} is made from {dotted!r}")
        if moves:
            self.moved.add(path)
        self._open.append(dotted)
        try:
            return self.expand(node, path)
        finally:
            self._open.pop()

    def _member(self, node: Any, key: str, parent: Path, who: Callable[[], str]) -> Any:
        # An ancestor may itself be made from something else, or be an interpolation.
        if isinstance(node, str) and "${" in node:
            node = OmegaConf.select(OmegaConf.create(self._original), ".".join(parent))
            node = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
        if isinstance(node, dict) and (INHERIT in node or COPY in node):
            node = self.expand(node, parent)
        if not isinstance(node, dict) or key not in node:
            there = ", ".join(map(str, node)) if isinstance(node, dict) else repr(node)
            raise ConfigError(
                f"{who()}, but {'.'.join(parent) or 'the configuration'} has no {key!r}; it has: {there}."
            )
        return node[key]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings key by key, everything else replaced, an unset `???` replaces nothing."""
    result: Any = OmegaConf.to_container(OmegaConf.merge(base, over), resolve=False)
    return dict(result)


def _names(given: Any, where: Path) -> set[str]:
    if given is None:
        return set()
    if not isinstance(given, str):
        raise ConfigError(f"{'.'.join(where)}.{DELETE} is {given!r}; give names separated by commas, in one text.")
    return {name.strip() for name in given.split(",") if name.strip()}


def _remove(tree: dict[str, Any], path: Path) -> None:
    node: Any = tree
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)
