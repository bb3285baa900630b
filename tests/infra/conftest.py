"""Directories of services that are always ended, whatever a test does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from roundhouse.infra import processes, services
from roundhouse.infra.state import StateDirectory


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rh-test-") as directory:
        path = Path(directory) / "services"
        yield path
        services.down(path)


@pytest.fixture
def remaining() -> Callable[[Path], list[psutil.Process]]:
    """Live processes that belong to a state directory."""
    return lambda path: processes.members(StateDirectory(path))
