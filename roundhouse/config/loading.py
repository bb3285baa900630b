"""From a YAML file and `--set` overrides to a `RunConfig`, or to an error that says what to change.

Invariant: what comes out is complete and typed; nothing that the file or the command line said was ignored.
Precedence: defaults < file < overrides, the later the stronger; the default of `store` is ROUNDHOUSE_STORE, where that is set.
`${VAR}` and `${VAR:-default}` in the file are taken from the environment; `${CONFIG_DIR}` is the file's own directory.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from roundhouse.config.checks import refuse_unsound, with_correction
from roundhouse.config.kubernetes import CollectorPods, GymPods, TrainerPods
from roundhouse.config.models import RunConfig
from roundhouse.config.operations import SINKS
from roundhouse.config.renamed import renamed_in
from roundhouse.config.secrets import is_secret_name, masked, masked_text
from roundhouse.config.section import LAUNCHERS, RECORDED, operational_keys
from roundhouse.config.yaml_text import in_words, load_yaml, read_yaml
from roundhouse.errors import ConfigError


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """Read a configuration file and apply overrides such as `train.optimizer.learning_rate=3e-4`.

    Raises:
        ConfigError: unreadable file, unknown key, impossible value or combination.
    """
    file = Path(path)
    if not file.is_file():
        near = sorted(str(p) for p in Path("configs").glob("*.yaml")) if Path("configs").is_dir() else []
        hint = f" There are: {', '.join(near)}." if near else ""
        raise ConfigError(f"No configuration file {file}.{hint}")
    tree = read_yaml(file, lambda name, default: _variable(name, default, file)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}, not a mapping of keys.")
    if store := os.environ.get("ROUNDHOUSE_STORE"):
        tree.setdefault("store", store)
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree, origin=str(file))


def parse_config(tree: dict[str, Any], origin: str = "the configuration", *, recorded: bool = False) -> RunConfig:
    """Validate a plain tree of keys; `recorded` where it is read to look at what a run was (`section.RECORDED`)."""
    if renamed := renamed_in(tree):
        raise ConfigError(f"{origin}:\n" + "\n".join(f"  {masked_text(each)}." for each in renamed))
    try:
        config = RunConfig.model_validate(tree, context=RECORDED if recorded else None)
    except ValidationError as error:
        raise ConfigError(f"{origin}:\n" + "\n".join(_explain(item) for item in error.errors())) from None
    config = with_correction(config.asynchrony, config)
    refuse_unsound(config.asynchrony, config)
    return config


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
        raise ConfigError(f"Override {override!r}: the value is no YAML: {error}") from error
    # YAML 1.1 reads 3e-4 as text because it has no dot; people mean the number. In quotes it is text.
    node[leaf] = float(value) if isinstance(value, str) and _EXPONENT.fullmatch(text.strip()) else value


def config_digest(config: BaseModel) -> str:
    """First 16 hex digits of SHA-256 over the canonical JSON of the configuration."""
    return digest_of_tree(config.model_dump(mode="json"))


def digest_of_tree(tree: dict[str, Any]) -> str:
    """As `config_digest`, of a configuration as it was written down: keys that came later take no part."""
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def config_yaml(config: BaseModel) -> str:
    """The resolved configuration as YAML, in the order of its fields."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(old: BaseModel, new: BaseModel) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with (old, new)."""
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
    """One validation error as one line: key, value, what is wrong, remedy."""
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
        return f"  {section}.kind: {tag!r} is none.{suggestion} There are: {', '.join(known)}."
    message = masked_text(item["msg"].removeprefix("Value error, "))
    if item["type"] == "string_pattern_mismatch":
        message = f"must be {in_words(item['ctx']['pattern'])}"
    given = (
        "" if item["type"] in ("missing", "value_error") else f" (given: {masked(item['input'], str(location[-1]))!r})"
    )
    return f"  {section or 'configuration'}: {message}{given}"


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
        models = [model for field in fields for model in _models_in(field.annotation)]
        named = any(typing.get_origin(field.annotation) is dict for field in fields)
    return ".".join(keys), sorted({name for model in models for name in model.model_fields})


def _tag(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("kind")
    choices = typing.get_args(field.annotation) if field is not None else ()
    return choices[0] if choices else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, dict):
        return [model for argument in typing.get_args(annotation) for model in _models_in(argument)]
    return []


_CODE = re.compile(
    r"(evaluation\.sets\.\w+\.)?environment\.(environments\.[\w.-]+\.)?(target|worker|evaluator|data_loader|workspace|command|verifier|config_paths|python|parameters\.nexau_agent_(config_path|workspace)|(rubric|audit)\.criteria\.[\w.-]+\.function)|train\.algorithm\.(target|policy_loss)|(train\.service|rollout\.distribution)\.launcher|generation\.weight_sync\.target|generation\.backend|tracking\.sinks|infra\..+\.image"
)
_OURS = {
    None, "vllm", "transformers", "trainer", "tinker", "simple", "agent", "mock", "nexau", "file",
    "clipped", "cispo", "reinforce", *LAUNCHERS,
    *(pods.model_fields["image"].default for pods in (TrainerPods, CollectorPods, GymPods)),
}  # fmt: skip
"""Values of these keys that name no code but Roundhouse's own."""


_SECRET = re.compile(r"(?:(?P<section>.+)\.)?\w*(key|token|secret|password|credential)\w*[._](variable|file)")
_ENDPOINTS = ("url", "base_url", "head_server", "model_server")


def unnamed_code(config: RunConfig, overrides: Iterable[str]) -> dict[str, str]:
    """Keys of the configuration that name code (classes, files, images), or a secret of this machine and the endpoint that it
    is sent to, with their values, but for those that `overrides` (`key=value`) give."""
    given = [override.partition("=")[0].strip() for override in overrides]
    values = flatten(config.model_dump(mode="json"))
    found = {
        key
        for key, value in values.items()
        if _CODE.fullmatch(key)
        and (value not in _OURS if not isinstance(value, list) else key != "tracking.sinks" or {*value} - {*SINKS})
    }
    for key, value in values.items():
        if value is not None and (secret := _SECRET.fullmatch(key)):
            sent = {f"{secret['section']}.{name}" for name in _ENDPOINTS}
            there = {endpoint for endpoint in sent if values.get(endpoint) is not None}
            if there or sent.isdisjoint(values):  # a class of one's own has no endpoint that is known here
                found |= {key, *there}
    return {
        key: str(value)
        for key, value in values.items()
        if key in found and not any(key == one or key.startswith(f"{one}.") for one in given)
    }


def refuse_unnamed_code(config: RunConfig, overrides: Iterable[str]) -> None:
    """Refuse to run what only the store names.

    A person who can write to a store can write a run's run.json. Code that it names is executed, and a secret of this machine
    sent to an endpoint that it names, only when the person who starts the run has named them too, or trusts the store.

    Raises:
        ConfigError: with the keys, and how to accept them.
    """
    if found := unnamed_code(config, overrides):
        lines = "\n".join(f"  {key}: {value}" for key, value in found.items())
        named = " ".join(f"--set {key}={value}" for key, value in found.items())
        raise ConfigError(
            f"The store's configuration of run {config.run_id!r} names code that would be executed here, or secrets and where "
            f"they would be sent:\n{lines}\n"
            "Whoever can write to the store can have written that. If it is what you expect, say so with --trust-store, or "
            f"name it yourself: {named}"
        )
