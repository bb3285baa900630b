"""The programs of docs/comparison.md: the lines that the page counts, and what ours do."""

import asyncio
import re
from pathlib import Path

import pytest

from roundhouse.config.environments import CustomEnvironment
from roundhouse.config.loading import load_config
from roundhouse.environments import load
from roundhouse.rollout.clients import LocalEnvironmentClient, verdict_on

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "docs/examples/comparison"


def lines_of(file: Path) -> int:
    """Return the number of lines that are neither empty nor a comment."""
    return sum(1 for line in file.read_text().splitlines() if line.strip() and not line.strip().startswith("#"))


def test_the_page_counts_the_lines_of_each_program() -> None:
    page = (ROOT / "docs/comparison.md").read_text()
    counts = re.findall(r"\[`([\w.]+)`\]\(examples/comparison/\1\) (\d+)", page)
    assert {name for name, _ in counts} == {file.name for file in PROGRAMS.iterdir() if file.is_file()}
    assert [(name, int(count)) for name, count in counts if lines_of(PROGRAMS / name) != int(count)] == []


@pytest.mark.parametrize("file", sorted(PROGRAMS.glob("*.yaml")), ids=lambda file: file.name)
def test_each_configuration_of_the_page_is_accepted(file: Path) -> None:
    assert load_config(file).run_id


def test_the_environment_with_two_tools_rewards_the_price_and_the_calls() -> None:
    client = LocalEnvironmentClient(load(CustomEnvironment(kind="custom", target=f"{PROGRAMS}/shop.py:Shop")))
    row = client.tasks("train")[0]

    async def replies() -> list[str]:
        session = await client.seed_session(row)
        return [
            (await session.call_tool(*call)).text
            for call in (("shelf_of", {"good": "bolts"}), ("price_at", {"shelf": "C3"}))
        ]

    assert asyncio.run(replies()) == ["C3", "7"]
    assert [asyncio.run(verdict_on(client, row, text)).reward for text in ("They cost 7.", "9")] == [0.8, 0.0]
