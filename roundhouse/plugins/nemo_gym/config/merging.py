"""Merge several sources into one tree of plain containers; interpolations and directives stay as written.

Invariant: only the order of precedence is applied; `sources` has the files' part of it.

`_inherit_from`, `_copy` and `_delete_key` make parts of a configuration from other parts. Invariant: every source is
read as it was before any directive, with the directives inside it applied, so the order of keys does not matter, and
several targets may use one source. An inherited source is moved: its old place is removed.

    math: {_inherit_from: generic, host: a}     math: generic's values, then host: a; `generic` is removed
    judge: {_copy: policy}                      judge: policy's values; `policy` stays
    name: ${copy:policy.name}                   the same for a single value; ${inherit_from:a.b} moves it
    math: {_delete_key: "x, y"}                 math without x and y, also inherited ones

Trees are plain containers: interpolations are texts, unset values are `???`. Filling of interpolations never raises: a
value that cannot be filled stays as written and is reported with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.config.sources import (
    DOTENV,
    Override,
    SearchRoots,
    config_paths_of,
    load_yaml,
    nested,
    parse_override,
    read_layers,
)

Tree = dict[str, Any]


def merge_sources(
    paths: Sequence[str],
    overrides: Sequence[str],
    roots: SearchRoots,
    initial: Mapping[str, Any] | None = None,
    *,
    dotenv: bool = True,
) -> tuple[Tree, list[str]]:
    """Files, `env.yaml`, `initial` and overrides as one tree, and warnings.

    Raises:
        ConfigError: a file or an override cannot be read, or an override hits nothing.
    """
    parsed = [parse_override(text) for text in overrides]
    overlay = OmegaConf.merge(
        OmegaConf.create(dict(initial or {})),
        *(nested(one.path, one.value) for one in parsed if one.action != "remove"),
    )
    located = roots.find(DOTENV) if dotenv else None
    private = load_yaml(located) if located else OmegaConf.create({})
    assert isinstance(overlay, DictConfig)
    from_dotenv = config_paths_of(private, DOTENV)
    # The command line adds to the files that it names by themselves, as NeMo Gym joins all of its `+config_paths`
    command_line_paths = [
        path
        for one in parsed
        if one.path == ("config_paths",) and one.action != "remove"
        for path in config_paths_of(OmegaConf.create({"config_paths": one.value}), "the command line")
    ]
    named = [*paths, *command_line_paths] or config_paths_of(overlay, "the initial values") or from_dotenv
    layers = read_layers(named, roots)
    if set(from_dotenv) - set(layers.paths):
        layers.warnings.append(f"The files named here take the place of {DOTENV}'s config_paths: {from_dotenv}.")
    below = _plain(OmegaConf.merge(*layers.trees, private, dict(initial or {})))
    parsed = [one for one in parsed if one.path != ("config_paths",) or one.action == "remove"]
    for override in parsed:
        _check_key(override, below)
    tree = _plain(OmegaConf.merge(below, overlay))
    for override in parsed:
        if override.action == "remove":
            node = tree
            for key in override.path[:-1]:
                node = node[key]
            del node[override.path[-1]]
    if layers.paths:
        tree["config_paths"] = layers.paths
    return tree, layers.warnings


def _check_key(override: Override, below: Tree) -> None:
    """A key to change or to remove must be there, unless a directive or an interpolation will bring it."""
    if override.action == "set":
        return
    node: Any = below
    for depth, key in enumerate(override.path):
        made_later = (
            "${" in node
            if isinstance(node, str)
            else isinstance(node, dict) and not node.keys().isdisjoint((INHERIT, COPY))
        )
        if made_later and override.action == "change":
            return
        if not isinstance(node, dict) or key not in node:
            contents = ", ".join(map(str, node)) if isinstance(node, dict) else "no keys"
            parent = ".".join(override.path[:depth]) or "the configuration"
            remedy = f" To add it, write ++{override.text}." if override.action == "change" else ""
            raise ConfigError(f"{override.text!r}: {parent} has no {key!r}; it has {contents}.{remedy}")
        node = node[key]
    if override.action == "remove" and override.has_value and node != override.value:
        raise ConfigError(f"{override.text!r}: {'.'.join(override.path)} is {node!r}.")


def unset_values(node: Any, where: str = "") -> list[str]:
    """Dotted paths of the values that are still `???`."""
    if node == MISSING:
        return [where]
    if isinstance(node, dict):
        children = [(f"{where}.{key}" if where else str(key), child) for key, child in node.items()]
    elif isinstance(node, list):
        children = [(f"{where}[{index}]", child) for index, child in enumerate(node)]
    else:
        return []
    return [path for place, child in children for path in unset_values(child, place)]


def merge_dummy_models(tree: Tree) -> None:
    """A placeholder `dummy_model` next to a real model supplies the fields that the real one does not set."""
    for entry in tree.values():
        models = entry.get("responses_api_models") if isinstance(entry, dict) else None
        if not isinstance(models, dict) or "dummy_model" not in models or len(models) < 2:
            continue
        dummy = models.pop("dummy_model")
        actual = next(iter(models))
        models[actual] = merged(dummy, models[actual])


def _plain(config: Any) -> Tree:
    tree: Any = OmegaConf.to_container(config, resolve=False)
    return dict(tree)


INHERIT, COPY, DELETE = "_inherit_from", "_copy", "_delete_key"
MISSING = "???"

_CALL = re.compile(r"\$\{(inherit_from|copy):\s*([^${}]+?)\s*\}")

KeyPath = tuple[str, ...]


def apply_directives(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with all directives applied; `tree` itself stays as it is.

    Raises:
        ConfigError: a source does not exist or is made from its own target; a key to delete does not exist.
    """
    expansion = _Expansion(tree)
    result: dict[str, Any] = expansion.expand(tree, ())
    for path in sorted(expansion.moved, key=len, reverse=True):
        node: Any = result
        for key in path[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(path[-1], None)
    return result


class _Expansion:
    def __init__(self, original: dict[str, Any]) -> None:
        self._original = original
        self._open: list[str] = []
        """Sources that are being read, the outermost first."""
        self.moved: set[KeyPath] = set()

    def expand(self, node: Any, where: KeyPath) -> Any:
        if isinstance(node, dict):
            deletion = node.get(DELETE)
            if deletion is None:
                unwanted = set()
            else:
                if not isinstance(deletion, str):
                    raise ConfigError(
                        f"{'.'.join(where)}.{DELETE} is {deletion!r}; give names separated by commas, in one text."
                    )
                unwanted = {name.strip() for name in deletion.split(",") if name.strip()}
            own = {
                key: child for key, child in node.items() if key not in (INHERIT, COPY, DELETE) and key not in unwanted
            }
            expanded = {key: self.expand(child, (*where, str(key))) for key, child in own.items()}
            if INHERIT not in node and COPY not in node:
                return expanded
            named = node[INHERIT] if INHERIT in node else node[COPY]
            source = self._source(named, where, moves=INHERIT in node)
            if source == MISSING:
                return MISSING
            if not isinstance(source, dict):
                raise ConfigError(f"{'.'.join(where)} is made from {named!r}, which is not a mapping.")
            mapping = merged(source, expanded)
            for key in sorted(unwanted - node.keys()):
                if key not in mapping:
                    raise ConfigError(
                        f"{'.'.join(where)}.{DELETE} names {key!r}, which is missing. Present: {', '.join(mapping)}."
                    )
                del mapping[key]
            return mapping
        if isinstance(node, list):
            return [self.expand(child, (*where, str(index))) for index, child in enumerate(node)]
        if isinstance(node, str) and (call := _CALL.fullmatch(node)):
            return self._source(call[2], where, moves=call[1] == "inherit_from")
        return node

    def _source(self, dotted: Any, where: KeyPath, *, moves: bool) -> Any:
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
            parent = path[:depth]
            # An ancestor may itself be made from something else, or be an interpolation
            if isinstance(node, str) and "${" in node:
                node = OmegaConf.select(OmegaConf.create(self._original), ".".join(parent))
                node = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
            if isinstance(node, dict) and (INHERIT in node or COPY in node):
                node = self.expand(node, parent)
            if not isinstance(node, dict) or key not in node:
                contents = ", ".join(map(str, node)) if isinstance(node, dict) else repr(node)
                raise ConfigError(
                    f"{name} is made from {dotted!r}, but {'.'.join(parent) or 'the configuration'} has no {key!r}; it has: "
                    f"{contents}."
                )
            node = node[key]
        if moves:
            self.moved.add(path)
        self._open.append(dotted)
        try:
            return self.expand(node, path)
        finally:
            self._open.pop()


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings key by key, everything else replaced, an unset `???` replaces nothing."""
    result: Any = OmegaConf.to_container(OmegaConf.merge(base, over), resolve=False)
    return dict(result)


_NOT_FOUND = re.compile(r"Interpolation key '([^']+)' not found")


@dataclass(slots=True)
class Filled:
    """Plain containers, and why some of their values are still interpolations."""

    value: Any
    unfilled: dict[KeyPath, str] = field(default_factory=dict)


def filled(config: DictConfig, path: Sequence[str] = ()) -> Filled:
    """Return the subtree at `path` with its interpolations filled from the whole of `config`.

    Raises:
        KeyError: `path` does not exist.
    """
    node: Any = config
    for key in path:
        if key not in node:
            raise KeyError(".".join(path))
        node = node[key]
    result = Filled(None)
    result.value = _fill(node, tuple(path), result.unfilled)
    return result


def _fill(node: Any, where: KeyPath, unfilled: dict[KeyPath, str]) -> Any:
    if isinstance(node, DictConfig):
        if node._is_none():
            return None
        return {key: _child(node, key, (*where, str(key)), unfilled) for key in node}
    if isinstance(node, ListConfig):
        if node._is_none():
            return None
        return [_child(node, index, (*where, str(index)), unfilled) for index in range(len(node))]
    return node


def _child(node: Any, key: Any, where: KeyPath, unfilled: dict[KeyPath, str]) -> Any:
    if OmegaConf.is_missing(node, key):
        return "???"
    try:
        value = node[key]
    except (OmegaConfBaseException, ValueError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if match := _NOT_FOUND.search(first):
            reason = (
                f"refers to {match[1]!r}, which is not set. Set it on the command line (++{match[1]}=…) or in env.yaml"
            )
        else:
            reason = first
        unfilled[where] = reason
        return str(node._get_node(key)._value())
    return _fill(value, where, unfilled)
