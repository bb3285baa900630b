"""The included environments as cases of a test."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from roundhouse import plugins
from roundhouse.config.models import EnvironmentConfig
from roundhouse.config.section import Section
from roundhouse.environments import included_sections

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


def kind_of(config: type[Section]) -> str:
    return config.model_fields["kind"].annotation.__args__[0]  # type: ignore[union-attr]


def needs(kind: str) -> pytest.MarkDecorator:
    """Skip a test without the plug-in of this environment."""
    return pytest.mark.skipif(kind not in plugins.names("environment"), reason=f"the environment {kind} is missing")


def having(*kinds: str) -> list[Any]:
    """Return kinds of environments as parameters of a test, each skipped without its plug-in."""
    return [pytest.param(kind, marks=needs(kind)) for kind in kinds]


def smallest(config: type[Section]) -> EnvironmentConfig:
    few = {"problems": 60} if "problems" in config.model_fields else {}
    return CONFIG.validate_python({"kind": kind_of(config), **few})


EACH_KIND = [
    pytest.param(config, id=kind_of(config), marks=[pytest.mark.real] if "sandbox" in config.model_fields else [])
    for config in included_sections()
]
"""Kinds with a sandbox start a process for each rollout."""
