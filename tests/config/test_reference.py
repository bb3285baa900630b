"""The configuration reference is generated from the models and therefore correct."""

from __future__ import annotations

import re
from pathlib import Path

from roundhouse.config.loading import flatten
from roundhouse.config.models import RunConfig
from roundhouse.config.reference import page

PAGE = Path(__file__).parents[2] / "docs/configuration-reference.md"


def test_the_page_is_the_models_printed():
    assert PAGE.read_text() == page(), "run: make reference"


def test_every_key_of_the_default_configuration_has_a_row():
    keys = {key.rsplit(".", 1)[-1] for key in flatten(RunConfig(run_id="r").model_dump(mode="json"))}
    rows = set(re.findall(r"^\| `([a-z_0-9]+)`", page(), re.M))
    assert keys - rows == set()


def test_links_between_forms_lead_to_a_heading():
    text = page()
    headings = {
        "".join(c for c in title.lower() if c.isalnum() or c in " -_").replace(" ", "-")
        for title in re.findall(r"^## (.+)$", text, re.M)
    }
    links = re.findall(r"\(#([^)]+)\)", text)
    assert links
    assert set(links) <= headings
