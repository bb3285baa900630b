"""An environment against its recorded rollouts: nothing found where nothing changed, and mutants that the corpus catches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.models import EnvironmentConfig
from roundhouse.plugins.lab.replays.environment_tests import check_environment
from tests.gym.kinds import needs
from tests.gym.recorded import collected, demonstrated, opened

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


@pytest.mark.parametrize(
    "tree", [{"kind": "calculator"}, pytest.param({"kind": "lookup", "problems": 60}, marks=needs("lookup"))], ids=str
)
def test_an_unchanged_environment_passes_and_its_mutants_are_caught(tree: dict[str, Any]) -> None:
    config = CONFIG.validate_python(tree)
    corpus = demonstrated(config, tasks=4) + demonstrated(config, tasks=2, size=2, max_turns=2)
    report = check_environment(corpus, config, mutants=6)
    assert report.unchanged
    assert len(report.mutants) == 6
    assert report.score is not None
    assert report.score >= 0.8
    assert check_environment(corpus, config, mutants=6).mutants == report.mutants, "the same again"


def test_without_a_corpus_there_is_nothing_to_mutate() -> None:
    assert check_environment([], CONFIG.validate_python({"kind": "calculator"}), mutants=5).mutants == []


@needs("lookup")
def test_the_command_fails_where_the_environment_answers_otherwise(tmp_path: Path) -> None:
    run = opened(tmp_path, {"kind": "lookup", "problems": 60})
    collected(run, 1, demonstrated(run.config.environment, tasks=4))

    def tested(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(app, ["env", "test", run.run_id, "--store", run.config.store, *arguments])
        return found.exit_code, found.stdout

    assert tested()[0] == 0
    code, said = tested(
        "--set",
        "environment={kind: custom, target: 'tests.plugins.example_environments.lookups:OtherAnswers'}",
        "--json",
    )
    assert code == 1
    assert set(json.loads(said)["reasons"]) == {"other_answer"}
    assert tested("--mutants", "4", "--min-score", "0.5")[0] == 0
