from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def no_resident_trainer() -> Iterator[None]:
    """Release the trainer that this process keeps between iterations, before and after the test."""
    from roundhouse.stages.trainer_home import release_trainers

    release_trainers()
    yield
    release_trainers()
