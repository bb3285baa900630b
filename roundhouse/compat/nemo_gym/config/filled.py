"""A configuration with its interpolations filled in, as far as they can be.

Invariant: a value that cannot be filled stays as it was written and is reported with the reason; nothing raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Path = tuple[str, ...]

_NOT_FOUND = re.compile(r"Interpolation key '([^']+)' not found")


@dataclass(slots=True)
class Filled:
    """Plain containers, and why some of their values are still interpolations."""

    value: Any
    unfilled: dict[Path, str] = field(default_factory=dict)


def filled(config: DictConfig, path: Sequence[str] = ()) -> Filled:
    """The subtree at `path` with its interpolations filled from the whole of `config`.

    Raises:
        KeyError: there is nothing at `path`.
    """
    node: Any = config
    for key in path:
        if key not in node:
            raise KeyError(".".join(path))
        node = node[key]
    result = Filled(None)
    result.value = _fill(node, tuple(path), result.unfilled)
    return result


def _fill(node: Any, where: Path, unfilled: dict[Path, str]) -> Any:
    if isinstance(node, DictConfig):
        if node._is_none():
            return None
        return {key: _child(node, key, (*where, str(key)), unfilled) for key in node}
    if isinstance(node, ListConfig):
        if node._is_none():
            return None
        return [_child(node, index, (*where, str(index)), unfilled) for index in range(len(node))]
    return node


def _child(node: Any, key: Any, where: Path, unfilled: dict[Path, str]) -> Any:
    if OmegaConf.is_missing(node, key):
        return "???"
    try:
        value = node[key]
    except (OmegaConfBaseException, ValueError, KeyError) as error:
        unfilled[where] = _reason(error)
        return str(node._get_node(key)._value())
    return _fill(value, where, unfilled)


def _reason(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if found := _NOT_FOUND.search(first):
        return f"refers to {found[1]!r}, which is not set. Set it on the command line (++{found[1]}=…) or in env.yaml"
    return first
