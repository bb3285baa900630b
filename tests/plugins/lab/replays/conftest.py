"""A recorded run, made once; tests only read it and replay it."""

from __future__ import annotations

import pytest

from roundhouse.store.run import Run
from tests.plugins.lab.replays.trained import trained_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three iterations on record."""
    return trained_run(tmp_path_factory.mktemp("replay"))
