"""Translate a configuration of another system by a table of its keys.

Invariant: every key of the foreign file is moved to a key of Roundhouse, is switched off or ignored here (this is
logged), or is listed in the one error, with its remedy. A key that the table lacks, and that a section of Roundhouse
may have, counts as Roundhouse's key.

    TABLE = {
        "grpo.max_num_steps": to("iterations"),
        "weight.sync_mode": to("asynchrony.mode", {"sync": "sync"}),
        "grpo.batch_multiplier": only(1, remedy="Raise grpo.num_prompts_per_step."),
        "cluster.*": unused(),
        "sft.*": refused("Train with roundhouse train-offline."),
        "policy.draft.*": switched("policy.draft.enabled", refused("Leave it off.")),
    }
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roundhouse.config.models import RunConfig
from roundhouse.config.secrets import is_secret_name, masked
from roundhouse.config.yaml_text import read_yaml
from roundhouse.errors import ConfigError

log = logging.getLogger(__name__)
Tree = dict[str, Any]
OFF: tuple[Any, ...] = (None, False, "", {}, [])
"""Values that ask for nothing, whatever their key."""
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@dataclass(frozen=True, slots=True)
class Rule:
    """The meaning of one foreign key here."""

    target: str = ""
    """Dotted key of this system; with `.*` at its end, of a section that is moved whole."""
    values: Mapping[Any, Any] | None = None
    """New values by foreign ones; the others are refused."""
    accepted: tuple[Any, ...] = ()
    """Values without effect here."""
    has_effect: bool = True
    remedy: str = ""
    switch: str = ""
    """Foreign key without which, or with a value that is off, this one is not used."""


def to(target: str, values: Mapping[Any, Any] | None = None, remedy: str = "") -> Rule:
    """Move a key; with `values`, these alone."""
    return Rule(target, values, remedy=remedy)


def only(*accepted: Any, remedy: str) -> Rule:
    """Accept these values, which are how it is here; refuse others."""
    return Rule(accepted=accepted, remedy=remedy)


def unused() -> Rule:
    """Accept every value and ignore it."""
    return Rule(has_effect=False)


def read() -> Rule:
    """Leave a key to the function that finishes the translation."""
    return Rule()


def refused(remedy: str) -> Rule:
    """Refuse every value that is not off."""
    return Rule(remedy=remedy)


def switched(switch: str, rule: Rule) -> Rule:
    """Use the rule if the foreign key `switch` is on."""
    return replace(rule, switch=switch)


@dataclass(slots=True)
class Translation:
    """A foreign configuration on its way."""

    keys: dict[str, Any]
    """Foreign values by dotted key."""
    own: Tree
    """The configuration of this system."""
    sources: dict[str, str] = field(default_factory=dict)
    """Foreign key that set a key of this system."""
    problems: dict[str, list[str]] = field(default_factory=dict)
    """Foreign keys by their remedy."""
    unused: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a foreign value; the default if it is missing or null."""
        value = self.keys.get(key)
        return default if value is None else value

    def refuse(self, key: str, remedy: str) -> None:
        """List a foreign key in the error."""
        value = masked(self.keys.get(key), key.rpartition(".")[2])
        entry = f"{key}: {'true' if value is True else 'false' if value is False else value}"
        self.problems.setdefault(remedy, []).append(entry)

    def put(self, target: str, value: Any, source: str) -> None:
        """Set a key of this system, unless it has another value already."""
        *parents, leaf = target.split(".")
        section = self.own
        for parent in parents:
            section = section.setdefault(parent, {}) if isinstance(section.get(parent, {}), dict) else {}
        if leaf in section and section[leaf] != value:
            origin = self.sources.get(target, f"{target} itself")
            self.refuse(source, f"{origin} sets {target} to {section[leaf]!r}: leave one of the two out.")
            return
        section[leaf] = value
        self.sources.setdefault(target, source)

    def default(self, target: str, value: Any, source: str) -> None:
        """Set a key of this system if it is unset."""
        section: Any = self.own
        for part in target.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        if section is None:
            self.put(target, value, source)


def translate(
    tree: Tree, origin: str, system: str, table: Mapping[str, Rule], finish: Callable[[Translation], None]
) -> Tree:
    """Return the configuration in the keys of Roundhouse.

    Args:
        origin: the file; `defaults` are searched in its directory.
        finish: sets keys that depend on several foreign ones.

    Raises:
        ConfigError: lists every key without a counterpart, with the remedy.
    """
    leaves = dict(_leaves(_resolved(with_defaults(tree, Path(origin).parent), origin), table))
    rules = {key: find_rule(table, key) for key in leaves}
    is_own = {key: rules[key] is None and key.partition(".")[0] in RunConfig.model_fields for key in leaves}
    result = Translation({key: value for key, value in leaves.items() if not is_own[key]}, {})
    for key in filter(is_own.__getitem__, leaves):
        result.put(key, leaves[key], key)
    for key, value in result.keys.items():
        if (rule := rules[key]) is not None:
            _apply(result, key, value, *rule)
        elif value not in OFF:
            result.refuse(key, "It has no counterpart here: leave it out.")
    finish(result)
    if (service := result.own.get("train", {}).get("service")) is not None:
        service.setdefault("kind", "resident")
    if result.problems:
        lines = [f"  {', '.join(keys)}\n    {remedy}" for remedy, keys in result.problems.items()]
        raise ConfigError(f"{origin} is a configuration of {system}, with keys to change first:\n" + "\n".join(lines))
    if result.unused:
        keys = ", ".join(dict.fromkeys(result.unused))
        log.warning("%s: these keys of %s have no effect here: %s", origin, system, keys)
    return result.own


def find_rule(table: Mapping[str, Rule], key: str) -> tuple[Rule, str] | None:
    """Return the rule of a key and an empty text; else that of the nearest section that contains it and the key's rest."""
    if key in table:
        return table[key], ""
    section = key
    while section:
        if f"{section}.*" in table:
            return table[f"{section}.*"], key.removeprefix(section)
        section = section.rpartition(".")[0]
    return None


def _apply(result: Translation, key: str, value: Any, rule: Rule, rest: str) -> None:
    if rule.switch and result.get(rule.switch) in OFF:
        return
    if rule.target and value is not None and (value or not rule.target.endswith(".*")):
        renamed = {None: value} if rule.values is None else dict(rule.values)
        name = None if rule.values is None else value
        if isinstance(name, list | dict) or name not in renamed:
            result.refuse(key, rule.remedy or f"Set it to {', '.join(map(str, renamed))}.")
        else:
            result.put(rule.target.removesuffix(".*") + rest, renamed[name], key)
    elif rule.remedy and value not in OFF and value not in rule.accepted:
        result.refuse(key, rule.remedy)
    elif not rule.has_effect and value not in OFF:
        result.unused.append(f"{key.removesuffix(rest)}.*" if rest else key)


def _leaves(tree: Tree, table: Mapping[str, Rule], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values; a section with a rule is one value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in table:
            yield from _leaves(value, table, f"{key}.")
        else:
            yield key, float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def with_defaults(tree: Tree, directory: Path) -> Tree:
    """Return the configuration merged over the files that its `defaults` names, relative to `directory`.

    Raises:
        ConfigError: one cannot be read.
    """
    names = tree.get("defaults") or []
    own = {key: value for key, value in tree.items() if key != "defaults"}
    base: Tree = {}
    for name in [names] if isinstance(names, str) else names:
        if name == "_self_":
            continue
        file = directory / str(name)
        file = file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")
        base = _merged(base, with_defaults(read_yaml(file) or {}, file.parent))
    return _merged(base, own)


def _merged(base: Tree, over: Tree) -> Tree:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict):
            below = merged.get(key)
            rest = {name: each for name, each in value.items() if name != "_override_"}
            merges = isinstance(below, dict) and not value.get("_override_")
            merged[key] = _merged(dict(below or {}), rest) if merges else rest
        else:
            merged[key] = value
    return merged


_RESOLVERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}


def _resolved(tree: Tree, origin: str) -> Tree:
    """Return the tree with its references (`${a.b}`, `${mul:…}`, `${oc.env:NAME}`) replaced by their values."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_resolver(name, function)
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.create(_secrets_named(tree, "", origin)), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{origin}: {getattr(error, 'full_key', '')}: {reason}. Set the value that it refers to."
        ) from error
    return plain


_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)(?:,[^}]*)?\}")


def _secrets_named(node: Any, key: str, origin: str) -> Any:
    """Return the tree with `{"variable": NAME}` for a secret that is all of a value: its text must not enter a run's records.

    Raises:
        ConfigError: a secret is a part of a value.
    """
    if isinstance(node, dict):
        return {
            name: _secrets_named(value, f"{key}.{name}" if key else str(name), origin) for name, value in node.items()
        }
    if isinstance(node, list):
        return [_secrets_named(value, key, origin) for value in node]
    names = [name for name in _VARIABLE.findall(node) if is_secret_name(name)] if isinstance(node, str) else []
    if not names:
        return node
    if _VARIABLE.fullmatch(node) and is_secret_name(key.rpartition(".")[2]):
        return {"variable": names[0]}
    raise ConfigError(
        f"{origin}: {key} takes in the environment variable {names[0]}, a secret by its name, which would be written to the "
        "store. Leave it out."
    )


def run_id_of(name: str) -> str:
    """Return the name of an experiment as the id of a run."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:63]


def beside(origin: str, path: Any) -> str:
    """Return a path unchanged, or absolute if it exists only in the configuration file's directory."""
    near = Path(origin).parent / str(path)
    return str(path) if os.path.exists(str(path)) or not near.exists() else str(near.resolve())
