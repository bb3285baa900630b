"""The example of the documentation runs, and its policy learns."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "docs/examples/grpo_in_one_file.py"


def test_grpo_in_one_file_learns_to_count_from_rewards_alone() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 300
    rewards = runpy.run_path(str(EXAMPLE))["train"](iterations=14)
    assert rewards[0] < 0.2, "chance is 0.1"
    assert sum(rewards[-3:]) / 3 > 0.3, rewards
