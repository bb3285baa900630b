"""The examples of docs/algorithms.md load, and the page names every kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from roundhouse.config.kinds import Kinds
from roundhouse.config.loading import parse_config

PAGE = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_page_loads(example: str) -> None:
    parse_config({"run_id": "r", **yaml.safe_load(example)})


def test_the_page_has_a_row_and_a_paragraph_for_every_kind() -> None:
    kinds = Kinds("algorithm").names()
    assert len(kinds) == 12
    for kind in kinds:
        assert f"| `{kind}` | " in PAGE
        assert f"**{kind}**." in PAGE
