"""From a YAML file and `--set` overrides to a `RunConfig`, or to an error with its remedy.

Invariant: the result is complete and typed; no part of the file or the command line is ignored. Precedence: defaults <
file < overrides; the default of `store` is ROUNDHOUSE_STORE, if that is set. `${VAR}` and `${VAR:-default}` in the file
come from the environment; `${CONFIG_DIR}` is the file's own directory.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from roundhouse import plugins
from roundhouse.config.defaults import with_default_rates
from roundhouse.config.kinds import Kinds
from roundhouse.config.models import RunConfig
from roundhouse.config.renamed import renamed_in
from roundhouse.config.secrets import is_secret_name, masked, masked_text
from roundhouse.config.section import RECORDED, operational_keys
from roundhouse.config.stale_rollouts import refuse_unsound, with_correction
from roundhouse.config.yaml_text import in_words, load_yaml, read_yaml
from roundhouse.errors import ConfigError
from roundhouse.shipped import shipped

SectionT = typing.TypeVar("SectionT", bound=BaseModel)


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """Read a configuration file and apply overrides such as `train.optimizer.learning_rate=3e-4`.

    Args:
        path: if it does not exist, the file of that name that comes with Roundhouse is read (`shipped`).

    Raises:
        ConfigError: unreadable file, unknown key, impossible value or combination.
    """
    file = shipped(path)
    if not file.is_file():
        inside = sorted(str(place) for place in file.glob("*.yaml")) if file.is_dir() else []
        near = inside or sorted(f"configs/{place.name}" for place in shipped("configs").glob("*.yaml"))
        hint = f" Available: {', '.join(near)}." if near else ""
        raise ConfigError(f"No configuration file {file}.{hint}")
    tree = read_yaml(file, lambda name, default: _variable(name, default, file)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}, not a mapping of keys.")
    return load_tree(tree, overrides, str(file))


def load_tree(tree: dict[str, Any], overrides: typing.Sequence[str], origin: str) -> RunConfig:
    """Return the configuration of plain keys, with overrides and the store of ROUNDHOUSE_STORE; it changes `tree`.

    Raises:
        ConfigError: unknown key, impossible value or combination.
    """
    if store := os.environ.get("ROUNDHOUSE_STORE"):
        tree.setdefault("store", store)
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree, origin=origin)


def _translated(tree: dict[str, Any], origin: str) -> dict[str, Any] | None:
    """Return a configuration of another system in the keys of this one; None if no translator knows it.

    Raises:
        ConfigError: lists the keys without a counterpart.
    """
    for name in plugins.names("translator"):
        try:
            translate = plugins.factory("translator", name)
        except ConfigError:  # a broken package must not hide the fault of the configuration
            continue
        translated: dict[str, Any] | None = translate(tree, origin)
        if translated is not None and translated != tree:
            return translated
    return None


def parse_config(tree: dict[str, Any], origin: str = "the configuration", *, recorded: bool = False) -> RunConfig:
    """Validate a plain tree of keys; `recorded` to read the record of a run (`section.RECORDED`)."""
    if renamed := renamed_in(tree):
        raise ConfigError(f"{origin}:\n" + "\n".join(f"  {masked_text(each)}." for each in renamed))
    try:
        config = RunConfig.model_validate(tree, context=RECORDED if recorded else None)
    except ValidationError as error:
        if (translated := _translated(tree, origin)) is not None:
            return parse_config(translated, origin, recorded=recorded)
        raise ConfigError(f"{origin}:\n" + "\n".join(_explain(item) for item in error.errors())) from None
    config = with_correction(config.asynchrony, config)
    refuse_unsound(config.asynchrony, config)
    return with_default_rates(config)


def parse_section(section: type[SectionT], tree: dict[str, Any], origin: str) -> SectionT:
    """Validate the keys of one section; `origin` names them in the error."""
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{origin}:\n" + "\n".join(_explain(item) for item in error.errors())) from None


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in the tree; the value is read as YAML (`1e-3` as a number, too)."""
    key, separator, text = override.partition("=")
    *parents, leaf = key.strip().split(".")
    if not separator or not all((*parents, leaf)):
        raise ConfigError(f"Override {override!r} is not of the form key.path=value.")
    node = tree
    for index, parent in enumerate(parents):
        if node.get(parent) is None:  # not there, or a section that is off
            node[parent] = {}
        child = node[parent]
        if not isinstance(child, dict):
            above = ".".join(parents[: index + 1])
            raise ConfigError(f"Override {override!r}: {above} is a value, not a section.")
        node = child
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"Override {override!r}: the value is not YAML: {error}") from error
    # YAML 1.1 reads 3e-4 as text because the dot is missing; users mean the number. In quotes it is text.
    node[leaf] = float(value) if isinstance(value, str) and _EXPONENT.fullmatch(text.strip()) else value


def config_digest(config: BaseModel) -> str:
    """First 16 hex digits of SHA-256 over the canonical JSON of the configuration."""
    return digest_of_tree(config.model_dump(mode="json"))


def digest_of_tree(tree: dict[str, Any]) -> str:
    """Return `config_digest` of a recorded configuration: later keys do not count."""
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def config_yaml(config: BaseModel) -> str:
    """The resolved configuration as YAML, in the order of its fields."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(old: BaseModel, new: BaseModel) -> dict[str, tuple[Any, Any]]:
    """Return dotted keys with different values, with (old, new)."""
    flat_old, flat_new = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    keys = sorted(flat_old.keys() | flat_new.keys())
    return {key: (flat_old.get(key), flat_new.get(key)) for key in keys if flat_old.get(key) != flat_new.get(key)}


def changes_of_identity(old: BaseModel, new: BaseModel) -> dict[str, tuple[Any, Any]]:
    """The differences that make another run of it: those of all keys but the operational ones (`section.Operational`)."""
    free = {*operational_keys(old), *operational_keys(new)}
    parts = {key: key.split(".") for key in differences(old, new)}
    return {
        key: pair
        for key, pair in differences(old, new).items()
        if not any(".".join(parts[key][:depth]) in free for depth in range(1, len(parts[key]) + 1))
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _variable(name: str, default: str | None, file: Path) -> str:
    """The text of `${name}` or `${name:-default}` in the file."""
    if name == "CONFIG_DIR":
        return str(file.parent)
    if name != "PWD" and is_secret_name(name):  # a shell's working directory
        raise ConfigError(
            f"{file} takes in the environment variable {name}, a secret by its name, which would be written to the store, "
            "to Prefect and to MLflow. Name the variable instead: {variable: NAME} under environment.parameters, the key "
            "that ends in _variable elsewhere."
        )
    if name in os.environ:
        return os.environ[name]
    if default is not None:
        return default
    raise ConfigError(f"{file} needs the environment variable {name}: set it, or write ${{{name}:-default}}.")


def _explain(item: Any) -> str:
    """Return one line for a validation error: key, value, fault, remedy."""
    location = list(item["loc"])
    if item["type"] == "extra_forbidden":
        section, known = _section_at(location[:-1])
        key = str(location[-1])
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        where = f"{section}.{key}" if section else key
        suggestion = f" Did you mean {near[0]!r}?" if near else ""
        return f"  {where}: unknown key.{suggestion} Known keys here: {', '.join(sorted(known))}."
    section, _ = _section_at(location)
    if item["type"] == "union_tag_invalid":
        tag, known = item["ctx"]["tag"], re.findall(r"'([^']+)'", item["ctx"]["expected_tags"])
        near = difflib.get_close_matches(tag, known, n=1)
        suggestion = f" Did you mean {near[0]!r}?" if near else ""
        return f"  {section}.kind: {tag!r} is unknown.{suggestion} Available: {', '.join(known)}."
    if item["type"] == "missing":
        return f"  {section}: not set, and without a default. Set it in the file, or with --set {section}=VALUE."
    message = masked_text(item["msg"].removeprefix("Value error, "))
    if item["type"] == "string_pattern_mismatch":
        message = f"must be {in_words(item['ctx']['pattern'])}"
    value_text = "" if item["type"] == "value_error" else f" (given: {masked(item['input'], str(location[-1]))!r})"
    return f"  {section or 'configuration'}: {message}{value_text}"


def _section_at(location: list[Any]) -> tuple[str, list[str]]:
    """Dotted key of an error's location without union tags, and the field names of the model there."""
    models: list[type[BaseModel]] = [RunConfig]
    keys: list[str] = []
    named = False
    """The part is a name of the user's, such as that of an evaluation set."""
    for part in location:
        if named:
            keys.append(str(part))
            named = False
            continue
        tagged = [model for model in models if _tag(model) == part]
        if tagged and len(models) > 1:
            models = tagged
            continue
        keys.append(str(part))
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [
            model for field in fields for each in (field.annotation, *field.metadata) for model in models_in(each)
        ]
        named = any(typing.get_origin(field.annotation) is dict for field in fields)
    return ".".join(keys), sorted({name for model in models for name in model.model_fields})


def _tag(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("kind")
    choices = typing.get_args(field.annotation) if field is not None else ()
    return choices[0] if choices else None


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a type, or a mark of one, consists of."""
    if isinstance(annotation, Kinds):
        return list(annotation.sections())
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, dict):
        return [model for argument in typing.get_args(annotation) for model in models_in(argument)]
    return []
