"""Classes named in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.compat.nexrl import Evaluator, SimpleRolloutWorker
from roundhouse.environments.base import Environment, GymnasiumEnvironment
from roundhouse.errors import ConfigError
from roundhouse.imports import load_class


@pytest.mark.parametrize(
    ("stored", "kind", "name"),
    [
        ("roundhouse.gym.environments.calculator:Calculator", Environment, "roundhouse.environments.calculator"),
        (
            "roundhouse.gym.environments.frozen_lake:FrozenLake",
            GymnasiumEnvironment,
            "roundhouse.environments.frozen_lake",
        ),
        ("roundhouse.gym.workers:SimpleRolloutWorker", SimpleRolloutWorker, SimpleRolloutWorker.__module__),
        ("roundhouse.gym.workers:Evaluator", Evaluator, Evaluator.__module__),
    ],
)
def test_a_stored_configuration_names_a_class_by_its_old_module(stored: str, kind: type, name: str) -> None:
    assert load_class(stored, kind, "environment.target").__module__ == name


def test_a_file_that_imports_an_old_module_is_refused_with_the_new_names(tmp_path: Path) -> None:
    file = tmp_path / "weather.py"
    file.write_text("from roundhouse.gym.environment import Environment\n")
    with pytest.raises(ConfigError, match=r"roundhouse\.gym\.environment is roundhouse\.environments\.base"):
        load_class(f"{file}:Weather", Environment, "environment.target")
