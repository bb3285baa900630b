"""Many sources, one tree: plain containers in which interpolations and directives stand as they were written.

Invariant: nothing is filled in or applied here but the order of precedence; see `sources` for the files' part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from roundhouse.compat.nemo_gym.config.directives import COPY, INHERIT, MISSING, merged
from roundhouse.compat.nemo_gym.config.overrides import Override, nested, parse_override
from roundhouse.compat.nemo_gym.config.sources import DOTENV, SearchRoots, config_paths_of, load_yaml, read_layers
from roundhouse.errors import ConfigError

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
    given = OmegaConf.merge(
        OmegaConf.create(dict(initial or {})),
        *(nested(one.path, one.value) for one in parsed if one.action != "remove"),
    )
    located = roots.find(DOTENV) if dotenv else None
    private = load_yaml(located) if located else OmegaConf.create({})
    assert isinstance(given, DictConfig)
    from_dotenv = config_paths_of(private, DOTENV)
    told = [path for one in parsed if one.path == ("config_paths",) for path in _named(one)]
    named = [*paths, *told] or config_paths_of(given, "the initial values") or from_dotenv
    layers = read_layers(named, roots)
    if set(from_dotenv) - set(layers.paths):
        layers.warnings.append(f"The files named here take the place of {DOTENV}'s config_paths: {from_dotenv}.")
    below = _plain(OmegaConf.merge(*layers.trees, private, dict(initial or {})))
    parsed = [one for one in parsed if one.path != ("config_paths",) or one.action == "remove"]
    for override in parsed:
        _check_key(override, below)
    tree = _plain(OmegaConf.merge(below, given))
    for override in parsed:
        if override.action == "remove":
            _drop(tree, override.path)
    if layers.paths:
        tree["config_paths"] = layers.paths
    return tree, layers.warnings


def _named(override: Override) -> list[str]:
    """Files that the command line adds to those that it names by themselves, as NeMo Gym joins all of its `+config_paths`."""
    if override.action == "remove":
        return []
    return config_paths_of(OmegaConf.create({"config_paths": override.value}), "the command line")


def _check_key(override: Override, below: Tree) -> None:
    """A key to change or to remove must be there, unless a directive or an interpolation will bring it."""
    if override.action == "set":
        return
    node: Any = below
    for depth, key in enumerate(override.path):
        made_later = _is_directive(node)
        if made_later and override.action == "change":
            return
        if not isinstance(node, dict) or key not in node:
            there = ", ".join(map(str, node)) if isinstance(node, dict) else "no keys"
            parent = ".".join(override.path[:depth]) or "the configuration"
            remedy = f" To add it, write ++{override.text}." if override.action == "change" else ""
            raise ConfigError(f"{override.text!r}: {parent} has no {key!r}; it has {there}.{remedy}")
        node = node[key]
    if override.action == "remove" and override.has_value and node != override.value:
        raise ConfigError(f"{override.text!r}: {'.'.join(override.path)} is {node!r}.")


def _is_directive(node: Any) -> bool:
    return (
        "${" in node
        if isinstance(node, str)
        else isinstance(node, dict) and not node.keys().isdisjoint((INHERIT, COPY))
    )


def _drop(tree: Tree, path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        tree = tree[key]
    del tree[path[-1]]


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
    """A stand-in `dummy_model` beside a real model gives it the fields that the real one does not set."""
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
