"""The built-in environments as cases of a test."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from roundhouse.config.models import EnvironmentConfig
from roundhouse.config.section import Section
from roundhouse.environments import included_sections

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


def kind_of(config: type[Section]) -> str:
    return config.model_fields["kind"].annotation.__args__[0]  # type: ignore[union-attr]


def smallest(config: type[Section]) -> EnvironmentConfig:
    few = {"problems": 60} if "problems" in config.model_fields else {}
    return CONFIG.validate_python({"kind": kind_of(config), **few})


EACH_KIND = [
    pytest.param(config, id=kind_of(config), marks=[pytest.mark.real] if "sandbox" in config.model_fields else [])
    for config in included_sections()
]
"""Kinds with a sandbox start a process for each rollout."""
