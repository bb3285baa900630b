"""The configuration reference is generated from the models and therefore correct."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from roundhouse.config.loading import flatten
from roundhouse.config.models import RunConfig
from roundhouse.config.reference import page, schema_text

ROOT = Path(__file__).parents[2]
PAGE, SCHEMA = ROOT / "docs/configuration-reference.md", ROOT / "configs/run.schema.json"
RUNS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "simulation")


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


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_for_editors_is_the_models_printed():
    assert SCHEMA.read_text() == schema_text(), "run: make reference"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_shipped_configuration_names_the_schema_in_its_first_line_and_is_valid_by_it(path, validator):
    name = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / name).resolve() == SCHEMA
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


def test_an_editor_can_underline_a_mistyped_key(validator):
    assert not validator.is_valid({"run_id": "r", "iteration": 3})
    assert not validator.is_valid({"run_id": "r", "train": {"minibatch": 3}})
