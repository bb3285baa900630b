"""The commands on recorded runs: their output, their exit codes, and the deletions of `runs delete`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from roundhouse.cli import app
from roundhouse.errors import DataError
from roundhouse.infra.consents import STATE_VARIABLE
from roundhouse.store.replays import replay_names
from roundhouse.store.run import Run
from roundhouse_flows.forms import ReplayForm
from tests.gym.recorded import collected, demonstrated, opened
from tests.plugins.lab.replays.trained import trained_run


def invoke(run: Run, *arguments: str, state: str = "") -> Result:
    """Run a command for a user with the state directory `state`, else that of the run."""
    own = {STATE_VARIABLE: state or run.config.infra.state}
    return CliRunner().invoke(app, [*arguments, "--store", run.config.store], env=own)


def test_replay_prints_what_differs_and_why_and_replays_shows_it_again(run: Run) -> None:
    same = invoke(run, "replay", run.run_id, "--iterations", "2", "--json")
    assert same.exit_code == 0, same.output
    assert json.loads(same.stdout)["first"] is None
    other = invoke(
        run, "replay", run.run_id, "--iterations", "2", "--name", "other", "--set", "train.optimizer.learning_rate=0.01"
    )
    assert other.exit_code == 0, other.output
    assert "because of configuration: train.optimizer.learning_rate 0.003 -> 0.01" in other.stdout
    listed = json.loads(invoke(run, "replays", "list", "--json").stdout)
    assert [each["outcome"] for each in listed if each["name"] == "other"] == ["differs from iteration 2, train"]
    assert json.loads(invoke(run, "replays", "show", "other").stdout)["first"]["iteration"] == 2
    assert "equal" in invoke(run, "replays", "list").stdout


def test_the_form_of_the_deployment_runs_the_same_replay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, run.config.infra.state)
    said: list[str] = []
    form = ReplayForm(
        run_id=run.run_id, store=run.config.store, first=3, stages=["train"], learning_rate=0.01, name="form"
    )
    found = form.replay(said.append)
    assert said == ["iteration 3: train"]
    assert found.first is not None
    assert found.first.because == ["configuration: train.optimizer.learning_rate 0.003 -> 0.01"]
    assert invoke(run, "replays", "show", "form").stdout == json.dumps(found.as_json(), indent=1) + "\n"


def test_the_drift_gate_ends_the_command_with_the_iteration(run: Run) -> None:
    found = invoke(
        run,
        "replay",
        run.run_id,
        "--iterations",
        "1:2",
        "--gate",
        "max_kl=1e-9",
        "--set",
        "train.optimizer.learning_rate=0.1",
    )
    assert isinstance(found.exception, DataError)
    assert "Stopped at iteration" in str(found.exception)
    assert "max_kl" in str(found.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--iterations", "x"), "not a span of iterations"),
        (("--iterations", "1", "--gate", "kl=1"), "--gate kl=1: give min_effective_tokens"),
        (("--iterations", "1", "--input", "rollouts"), "--input takes name=value"),
        (("--iterations", "1", "--input", "sequences=1"), "rollouts can be substituted"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_can(run: Run, arguments: tuple[str, ...], said: str) -> None:
    found = invoke(run, "replay", run.run_id, *arguments)
    assert found.exit_code != 0
    assert said in " ".join(f"{found.output} {found.exception}".split())


def test_rescore_prints_the_flips_by_task_and_asks_about_the_environment_alone(tmp_path: Path) -> None:
    run = opened(tmp_path, {"kind": "calculator"}, infra={"state": "/of/another/person"})
    collected(run, 1, demonstrated(run.config.environment, tasks=8))
    judge = "environment={kind: custom, target: 'tests.gym.judges:RefusesSevens'}"
    tested = invoke(run, "env", "test", run.run_id, "--set", judge, state=str(tmp_path / "own"))
    assert "flipped" in tested.stdout, tested.exception
    found = invoke(run, "rescore", run.run_id, "--name", "sevens", "--set", judge, state=str(tmp_path / "own"))
    assert found.exit_code == 0, found.exception
    assert "0 flipped" not in found.stdout
    assert "datasets/sevens/recorded-i000001" in found.stdout
    back = invoke(run, "rescore", "--dataset", "sevens", "--name", "back", "--json", state=str(tmp_path / "own"))
    counts = json.loads(back.stdout)["counts"]
    assert counts["flipped"] > 0, "its own verifier turns them back"
    both = invoke(run, "rescore", "--name", "x", state=str(tmp_path / "own"))
    assert "one of the two is judged" in str(both.exception)


def test_a_replay_is_deleted_alone_or_with_its_run(tmp_path: Path) -> None:
    run = trained_run(tmp_path, iterations=1)
    for name in ("a", "b"):
        assert (
            invoke(run, "replay", run.run_id, "--iterations", "1", "--stage", "validate", "--name", name).exit_code == 0
        )
    assert invoke(run, "replays", "delete", "a", "--yes").exit_code == 0
    assert replay_names(run.config.store) == ["b"]
    assert "with 1 replays (b)" in invoke(run, "runs", "delete", run.run_id, "--yes").stdout
    assert replay_names(run.config.store) == []
