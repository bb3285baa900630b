"""The fixtures of the training tests, which these are too."""

from __future__ import annotations

from tests.training.conftest import model_dir, one_thread

__all__ = ["model_dir", "one_thread"]
