"""What the lanes of an overlapped run tell each other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from roundhouse.asynchrony.overlap import Overlap
from roundhouse.errors import TooFewRollouts
from roundhouse.store.run import Run
from tests.asynchrony.test_resumption import new_run

PATIENCE = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return new_run(str(tmp_path), engine_url="http://127.0.0.1:9")


def test_an_iteration_is_not_blamed_for_a_later_ones_rollouts(run: Run) -> None:
    """They fail while the one before is still waited for: only who trains on them decides what becomes of them."""
    overlap, found = Overlap(run), []
    waiting = threading.Thread(target=lambda: found.append(overlap.collected(1)))
    waiting.start()
    failure = TooFewRollouts("4 of 4 rollouts failed")
    overlap.failed(2, failure)
    committed = run.begin(run.stage(1, "collect"), policy_version=0).commit()
    waiting.join(PATIENCE)
    assert found == [committed]
    assert not overlap.given_up
    with pytest.raises(TooFewRollouts) as raised:
        overlap.collected(2)
    assert raised.value is failure
    assert overlap.given_up, "both lanes are begun again"
