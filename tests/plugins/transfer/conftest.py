"""The fixtures of the training tests and of the engines' tests, which these are too."""

from __future__ import annotations

from tests.generation.conftest import policies
from tests.training.conftest import model_dir, one_thread

__all__ = ["model_dir", "one_thread", "policies"]
