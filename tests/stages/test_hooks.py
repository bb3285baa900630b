"""Stages of the user: computed once, with numbers that can be reported, by code that a person accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError
from roundhouse.stages.hooks import refuse_unfit_hooks, run_hook
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest
from tests.plugins.packages import install

SOURCE = """
calls = []

def size(run, iteration, reference):
    calls.append(iteration)
    return {"rows": len(calls), "share": 0.5}

def nothing(run, iteration, reference):
    return None

def infinite(run, iteration, reference):
    return {"a": float("inf")}

def broken(run, iteration, reference):
    return {"a": reference.rows}

def train(run, iteration, reference):
    return {}
"""


def run_with(tmp_path: Path, *targets: str) -> Run:
    return open_run(parse_config({"run_id": "r", "store": str(tmp_path), "stages": {"after_validate": list(targets)}}))


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(SOURCE)
    return f"{tmp_path}/own.py"


def validated(run: Run) -> Reference:
    return run.begin(run.stage(1, "validate"), policy_version=0).commit(metrics={})


def test_a_stage_is_computed_once_and_keeps_its_numbers_under_its_name(file: str, tmp_path: Path) -> None:
    run = run_with(tmp_path, f"{file}:size")
    before = validated(run)
    first, second = (run_hook(run, 1, f"{file}:size", "stages.after_validate", before) for _ in range(2))
    assert first == second
    assert read_manifest(first).metrics == {"size/rows": 1.0, "size/share": 0.5}
    assert read_manifest(first).inputs["validate"] == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "returned a NoneType. Return numbers by name"),
        ("infinite", "returned inf for 'a'. Return finite numbers"),
        ("broken", "raised AttributeError"),
    ],
)
def test_what_cannot_be_reported_is_a_data_error_with_the_place(
    name: str, text: str, file: str, tmp_path: Path
) -> None:
    run = run_with(tmp_path)
    with pytest.raises(DataError) as error:
        run_hook(run, 1, f"{file}:{name}", "stages.after_validate", validated(run))
    assert f"stages.after_validate: {file}:{name}" in str(error.value)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (["own.py:nowhere"], "has no function nowhere"),
        (["own.py:train"], "train is a built-in stage. Rename the function"),
    ],
)
def test_a_function_that_cannot_be_a_stage_is_refused_before_a_run(
    targets: list[str], text: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        refuse_unfit_hooks(run_with(tmp_path, *targets).config)


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ({"after_validate": ["size"]}, "'size' is not a stage: no plug-in has one. Name a function as module:function"),
        ({"after_validate": ["a:b/c"]}, "ends with 'b/c', which names no stage"),
        ({"after_validate": ["a:f"], "after_checkpoint": ["b:f"]}, "several functions with the name f"),
    ],
)
def test_a_name_that_is_no_stage_or_two_is_refused(stages: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config({"run_id": "r", "stages": stages})


def test_a_store_cannot_run_a_function_but_an_installed_plug_in(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_with(tmp_path, f"{file}:size").config
    assert "stages.after_validate" in unnamed_code(config, [])
    source = "from roundhouse.plugins import Plugin\nROWS = Plugin('rh_rows:rows')\ndef rows(*_):\n    return {}\n"
    install(tmp_path / "site", "rh-rows", {"stage_hook.rows": "rh_rows:ROWS"}, {"rh_rows": source})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    installed = parse_config({"run_id": "r", "stages": {"after_checkpoint": ["rows"]}})
    assert unnamed_code(installed, []) == {}
    refuse_unfit_hooks(installed)
    unknown = {"run_id": "r", "stages": {"after_checkpoint": [f"{file}:nowhere"]}}
    with pytest.raises(ConfigError, match=r"stages\.after_checkpoint.*no function nowhere"):
        refuse_unfit_hooks(parse_config(unknown))
