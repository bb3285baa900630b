"""A run that loses one rank of two ends in the bytes of the run that did not. The long version: `make chaos-ranks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.rank_kills import campaign

pytestmark = pytest.mark.real


@pytest.mark.long
@pytest.mark.timeout(900)  # eight starts of ranks, each with the product's own limit of 300 s
def test_a_rank_killed_in_each_phase_leaves_none_behind_and_changes_no_byte(tmp_path: Path) -> None:
    found = campaign(tmp_path, ranks=2, kills=6, seed=1)
    assert found["by_phase"] == dict.fromkeys(("load", "forward", "backward", "update", "save", "publish"), 1)
    assert {found[fault] for fault in ("differing", "left", "problems")} == {0}
    assert found["versions"] == 3
