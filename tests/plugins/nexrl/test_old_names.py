"""Stored configurations name classes by their old modules."""

from __future__ import annotations

import pytest

from roundhouse.imports import load_class
from roundhouse.plugins.nexrl import Evaluator, SimpleRolloutWorker


@pytest.mark.parametrize("kind", [SimpleRolloutWorker, Evaluator])
def test_a_stored_configuration_names_a_class_by_its_old_module(kind: type) -> None:
    found = load_class(f"roundhouse.gym.workers:{kind.__name__}", kind, "environment.worker")
    assert found.__module__ == kind.__module__
