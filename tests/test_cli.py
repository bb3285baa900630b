import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundhouse.cli.exit_codes import FINAL, exit_code
from roundhouse.config.loading import load_config, parse_config
from roundhouse.errors import (
    ConfigError,
    DataError,
    DiskFull,
    InfraError,
    RoundhouseError,
    StoreError,
    TooFewRollouts,
    TooFewSequences,
)
from roundhouse.generation.deployment import DeploymentFailed
from roundhouse.stages.budget import BudgetReached
from roundhouse.store.run import open_run

ROUNDHOUSE = Path(sys.executable).with_name("roundhouse")
ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def roundhouse(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [ROUNDHOUSE, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, env=environment
    )


def test_help_lists_the_commands_without_loading_heavy_libraries() -> None:
    code = (
        "import sys, roundhouse.cli as c; sys.argv = ['roundhouse', '--help']\n"
        "try: c.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'prefect', 'mlflow', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("train", "collect", "evaluate", "runs", "up", "down", "doctor", "quickstart"):
        assert command in done.stdout


def test_help_answers_well_under_a_second_of_cpu() -> None:
    before = os.times()
    assert roundhouse("--help").returncode == 0
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    assert cpu < 0.9


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_resolves_and_prints_back_to_itself(config: Path, tmp_path: Path) -> None:
    done = roundhouse("train", str(config), "--dry-run", "--set", "seed=11")
    assert done.returncode == 0, done.stderr
    (tmp_path / "resolved.yaml").write_text(done.stdout)
    assert load_config(tmp_path / "resolved.yaml") == load_config(config, ["seed=11"])


def test_a_dry_run_leaves_nothing_behind(tmp_path: Path) -> None:
    assert roundhouse("train", str(CONFIGS[0]), "--dry-run", cwd=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_is_one_clear_line_and_the_exit_code_of_a_configuration() -> None:
    done = roundhouse("train", str(CONFIGS[0]), "--set", "rollout.group_sise=4")
    assert done.returncode == 78
    assert "rollout.group_sise: unknown key. Did you mean 'group_size'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_square_brackets_reach_the_reader_of_an_error_and_of_a_finding(tmp_path: Path) -> None:
    """Rich takes [words] for its markup, and leaves them out."""
    done = roundhouse("train", "missing[0-9].yaml")
    assert "No configuration file missing[0-9].yaml." in done.stderr
    done = roundhouse("doctor", "--state", str(tmp_path / "[bold]"))
    assert "[bold] can be written" in done.stdout


@pytest.mark.parametrize(
    ("error", "code", "final"),
    [
        (ConfigError, 78, True),
        (DataError, 65, True),
        (TooFewSequences, 65, True),
        (BudgetReached, 77, True),
        (StoreError, 74, False),
        (InfraError, 75, False),
        (DiskFull, 75, False),
        (TooFewRollouts, 75, False),
        (DeploymentFailed, 1, False),
    ],
)
def test_exit_codes_tell_whether_the_same_command_can_help(
    error: type[RoundhouseError], code: int, final: bool
) -> None:
    assert exit_code(error("why")) == code
    assert (code in FINAL) is final


def test_a_missing_argument_is_told_without_a_traceback() -> None:
    done = roundhouse("train")
    assert done.returncode == 2
    assert "CONFIG" in done.stderr.upper()
    assert "Traceback" not in done.stderr


def test_runs_are_listed_and_shown_for_people_and_programs(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = open_run(parse_config({"run_id": "one", "store": store}))
    attempt = run.begin(run.stage(0, "evaluate"), policy_version=0)
    metrics = {"evaluation/reward_mean": 0.25, "evaluation/reward_stderr": 0.05, "evaluation/tasks": 8.0}
    attempt.commit(metrics=metrics)
    assert "0.250 ± 0.050" in roundhouse("runs", "list", "--store", store).stdout
    [listed] = json.loads(roundhouse("runs", "list", "--store", store, "--json").stdout)
    shown = json.loads(roundhouse("runs", "show", "one", "--store", store, "--json").stdout)
    assert listed == shown
    assert shown["evaluation"]["before"]["reward_mean"] == 0.25
    assert shown["iterations"] == 0
    assert roundhouse("runs", "show", "one", "--store", store).returncode == 0
    missing = roundhouse("runs", "show", "two", "--store", store)
    assert missing.returncode == 74
    assert "Runs there: one." in missing.stderr


def test_down_with_nothing_running_says_so(tmp_path: Path) -> None:
    began = time.monotonic()
    assert "nothing was running" in roundhouse("down", "--state", str(tmp_path)).stdout
    assert time.monotonic() - began < 30


def test_doctor_reports_for_programs(tmp_path: Path) -> None:
    done = roundhouse("doctor", "--state", str(tmp_path), "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == int(any(finding["status"] == "fail" for finding in findings))
    assert {"name", "status", "detail", "remedy"} <= findings[0].keys()
    assert {finding["status"] for finding in findings} <= {"ok", "warn", "fail"}
