"""The published chat templates in TRL continue recorded tokens as tests/generation/chat_templates.py states."""

from pathlib import Path

import pytest

from roundhouse.generation.chat import ChatCodec
from tests.generation.chat_templates import FORMATS, Format
from tests.generation.test_continuation import check

pytestmark = pytest.mark.contract("trl-1.16.0")


@pytest.mark.parametrize("family", [each for each in FORMATS if each.published], ids=lambda family: family.name)
def test_a_published_template_continues_its_tokens(family: Format, foreign_python: Path, tmp_path: Path) -> None:
    [folder] = (foreign_python.parent.parent / "lib").glob("python*/site-packages/trl/chat_templates")
    template = (folder / f"{family.published}.jinja").read_text()
    check(ChatCodec(str(family.save(tmp_path, template)), 4096), family)
