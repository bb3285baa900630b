"""`roundhouse init`: the written project passes its test, is valid, and trains unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import orjson
import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.errors import ConfigError
from roundhouse.store.run import load_run
from tests.e2e.test_pretrained import is_installed

ROUNDHOUSE = str(Path(sys.executable).with_name("roundhouse"))
NEEDS_MODEL = pytest.mark.skipif(not is_installed(), reason="needs the model SmolLM2: make smollm2")
KINDS = ["--environment", pytest.param("--dataset", marks=NEEDS_MODEL)]


def typed(directory: Path, *words: str) -> str:
    """Return the output of a command that runs in the project."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_passes_its_test_and_its_configuration_is_valid(tmp_path: Path, kind: str) -> None:
    project = tmp_path / "words"
    made = CliRunner().invoke(app, ["init", str(project), kind])
    assert made.exit_code == 0, made.exception
    assert {path for path in map(Path, made.stdout.split()) if not path.is_file()} == set()
    assert " passed" in typed(project, sys.executable, "-m", "pytest", "-q")
    assert "words" in typed(project, ROUNDHOUSE, "train", "run.yaml", "--dry-run")
    line, text = (project / "run.yaml").read_text().split("\n", 1)
    schema = project / line.removeprefix("# yaml-language-server: $schema=")
    jsonschema.Draft202012Validator(orjson.loads(schema.read_bytes())).validate(yaml.safe_load(text))
    steps = yaml.safe_load((project / ".github/workflows/test.yml").read_text())["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step][-2:] == ["pytest", "roundhouse train run.yaml --dry-run"]


@pytest.mark.parametrize(
    ("kind", "file"), [("--dataset", "rewards.py"), ("--environment", "run.yaml"), ("--dataset", "README.md")]
)
def test_a_directory_with_one_of_the_files_is_left_as_it_is(tmp_path: Path, kind: str, file: str) -> None:
    project = tmp_path / "words"
    project.mkdir()
    (project / file).write_text("mine")
    refused = CliRunner().invoke(app, ["init", str(project), kind])
    assert isinstance(refused.exception, ConfigError)
    assert f"words has {file} already" in str(refused.exception)
    assert [path.name for path in project.iterdir()] == [file]
    assert (project / file).read_text() == "mine"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_is_trained_through_an_iteration(tmp_path: Path, kind: str) -> None:
    """With a short warm start and few rollouts: the test shows that the files fit together, not that the policy learns."""
    project = tmp_path / "words"
    short = {"iterations": 1, "rollout.prompts_per_iteration": 2, "evaluation.every": "null"}
    if kind == "--environment":
        short["policy.steps"] = 40
    typed(tmp_path, ROUNDHOUSE, "init", "words", kind)
    try:
        typed(project, ROUNDHOUSE, "train", "run.yaml", "--set", *(f"{key}={value}" for key, value in short.items()))
        assert load_run(str(project / ".roundhouse/store"), "words").checkpoint_versions() == [0, 1]
    finally:
        typed(project, ROUNDHOUSE, "down")
