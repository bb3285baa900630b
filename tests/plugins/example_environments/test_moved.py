"""Stored configurations name the example environments by their earlier modules."""

from __future__ import annotations

import pytest

from roundhouse.environments.base import Environment, GymnasiumEnvironment
from roundhouse.imports import load_class
from roundhouse.plugins.example_environments.frozen_lake import FrozenLake
from roundhouse.plugins.example_environments.search import Lookup


@pytest.mark.parametrize("package", ["roundhouse.environments", "roundhouse.gym.environments"])
def test_a_stored_configuration_names_a_class_by_its_old_module(package: str) -> None:
    assert load_class(f"{package}.search:Lookup", Environment, "environment.target") is Lookup
    assert load_class(f"{package}.frozen_lake:FrozenLake", GymnasiumEnvironment, "environment.target") is FrozenLake
