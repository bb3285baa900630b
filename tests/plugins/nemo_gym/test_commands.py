"""The commands of foreign servers, their virtual environments, replacements, and the command line."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.cli import app as roundhouse
from roundhouse.config.loading import load_config
from roundhouse.environments import load
from roundhouse.errors import ConfigError, InfraError
from roundhouse.plugins.nemo_gym.commands import gym as app
from roundhouse.plugins.nemo_gym.config.resolve import Resolution, resolve
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots
from roundhouse.plugins.nemo_gym.servers.commands import Foreign, commands, install, install_steps
from roundhouse.plugins.nemo_gym.servers.scaffold import write_environment
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.rollout.clients import LocalEnvironmentClient, verdict_on

pytestmark = pytest.mark.real

WEATHER = """
weather:
  resources_servers:
    weather: {entrypoint: app.py, domain: agent}
weather_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      max_steps: 4
      resources_server: {type: resources_servers, name: weather}
      model_server: {type: responses_api_models, name: policy_model}
policy_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: http://127.0.0.1:1/v1
      api_key: sesame
      model: m
      return_token_id_information: true
      uses_reasoning_parser: true
      chat_template_kwargs: null
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A foreign server's directory with a virtual environment that leads to this interpreter."""
    place = tmp_path / "resources_servers" / "weather"
    (place / ".venv" / "bin").mkdir(parents=True)
    (place / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (place / ".venv" / "bin" / "activate").touch()
    (place / "app.py").touch()
    (place / "requirements.txt").touch()
    (tmp_path / "w.yaml").write_text(WEATHER)
    return tmp_path


def resolved(checkout: Path, *overrides: str, ours: bool = True) -> tuple[Resolution, SearchRoots]:
    roots = SearchRoots.of(cwd=checkout, environ={})
    return resolve(["w.yaml"], overrides, roots, ours=ours), roots


# -- commands -------------------------------------------------------------------------------------------------------


def test_a_foreign_server_runs_in_its_directory_with_its_own_python(checkout):
    resolution, roots = resolved(checkout)
    found, problems = commands(resolution, roots, Foreign(), {"PATH": "/bin", "PYTHONPATH": "/mine"})
    assert problems == []
    weather = next(command for command in found if command.instance.name == "weather")
    venv = checkout / "resources_servers" / "weather" / ".venv"
    assert weather.arguments == (str(venv / "bin" / "python"), "app.py")
    assert weather.directory == checkout / "resources_servers" / "weather"
    assert weather.environment["PATH"] == f"{venv / 'bin'}:/bin"
    assert weather.environment["VIRTUAL_ENV"] == str(venv)
    assert weather.environment["PYTHONPATH"].split(":") == [str(weather.directory), str(checkout), "/mine"]
    assert weather.environment["NEMO_GYM_CONFIG_PATH"] == "weather"
    assert weather.environment["NEMO_GYM_EXTRA_ROOTS"] == str(checkout)


def test_virtual_environments_may_lie_under_another_root(checkout, tmp_path):
    resolution, roots = resolved(checkout, f"++uv_venv_dir={tmp_path / 'venvs'}")
    (problem,) = commands(resolution, roots, Foreign())[1]
    assert str(tmp_path / "venvs" / "resources_servers" / "weather" / ".venv") in problem
    assert "--install" in problem
    assert commands(resolution, roots, Foreign(install=True))[1] == []
    assert commands(resolution, roots, Foreign(python=Path(sys.executable)))[1] == []


def test_what_prevents_a_start_is_told_for_all_servers_at_once(checkout):
    (checkout / "resources_servers" / "weather" / "app.py").unlink()
    resolution, roots = resolved(checkout, ours=False)
    told = "\n".join(commands(resolution, roots, Foreign())[1])
    assert "weather: entrypoint is 'app.py'" in told
    assert "weather_agent: no directory responses_api_agents/simple_agent" in told
    assert "policy_model: no directory" in told


# -- replacements ---------------------------------------------------------------------------------------------------


def test_their_agent_and_model_server_can_be_replaced_by_ours_in_place(checkout):
    resolution, _ = resolved(checkout)
    assert resolution.problems == []
    assert {one.name: (one.implementation, one.kind) for one in resolution.instances} == {
        "weather": ("weather", "foreign"),
        "weather_agent": ("roundhouse_agent", "own"),
        "policy_model": ("roundhouse_model", "own"),
    }
    assert resolution.fields(resolution.instances[1])["max_steps"] == 4


def test_a_field_that_ours_does_not_know_is_refused(checkout):
    resolution, _ = resolved(checkout, "++weather_agent.responses_api_agents.simple_agent.hopes=high")
    (problem,) = resolution.problems
    assert problem.startswith("weather_agent.responses_api_agents.roundhouse_agent: hopes")


# -- virtual environments -------------------------------------------------------------------------------------------


def fake_uv(directory: Path, *, fails: bool = False) -> dict[str, str]:
    """A uv that creates the interpreter's directory, records its calls, and may fail to install."""
    directory.mkdir()
    script = directory / "uv"
    script.write_text(
        f"#!/bin/sh\necho asked: $*\nif [ $1 = venv ]; then for last; do :; done; mkdir -p $last/bin; "
        f"touch $last/bin/python $last/bin/activate; else exit {7 if fails else 0}; fi\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


SETTINGS = {"python_version": "3.12.1", "head_server_deps": ["ray==2.1"], "skip_venv_if_present": True}


async def test_an_environment_is_made_once_and_one_that_failed_is_made_again(tmp_path):
    place, log = tmp_path / "server", tmp_path / "log"
    place.mkdir()
    (place / "requirements.txt").touch()
    venv = place / ".venv"
    with pytest.raises(InfraError, match="ended with 7"):
        await install(place, venv, SETTINGS, fake_uv(tmp_path / "bad", fails=True), log)
    good = fake_uv(tmp_path / "good")
    assert await install(place, venv, SETTINGS, good, log) is True
    assert await install(place, venv, SETTINGS, good, log) is False
    assert await install(place, venv, {**SETTINGS, "skip_venv_if_present": False}, good, log) is True
    assert f"asked: pip install --python {venv}/bin/python -r requirements.txt ray==2.1" in log.read_text()


async def test_without_uv_the_remedy_is_told(tmp_path):
    with pytest.raises(InfraError, match="uv, which is not on PATH"):
        await install(tmp_path, tmp_path / ".venv", SETTINGS, {"PATH": "/nowhere"}, tmp_path / "log")


def test_the_project_file_decides_what_is_installed(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    assert install_steps(tmp_path, tmp_path / ".venv", SETTINGS)[1].arguments[-3:] == ["-e", ".", "ray==2.1"]
    (tmp_path / "requirements.txt").touch()
    with pytest.raises(ConfigError, match="keep one"):
        install_steps(tmp_path, tmp_path / ".venv", SETTINGS)


def gym_root(root: Path, checkout: bool, version: str = "0.7.0") -> Path:
    """A directory of NeMo Gym with one server: as a checkout, or as pip installs it."""
    place = root / "resources_servers" / "weather"
    place.mkdir(parents=True)
    (place / "requirements.txt").write_text("-e nemo-gym[dev] @ ../../\nrequests\n")
    (root / "nemo_gym").mkdir()
    major, minor, patch = version.split(".")
    (root / "nemo_gym" / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n")
    if checkout:
        (root / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.13.14"\n')
    else:
        (metadata := root / f"nemo_gym-{version}.dist-info").mkdir()
        (metadata / "METADATA").write_text(f"Name: nemo-gym\nVersion: {version}\nRequires-Python: >=3.13.14\n\ntext\n")
    return place


@pytest.mark.parametrize("checkout", [True, False])
def test_an_environment_has_the_python_that_nemo_gym_requires(tmp_path, checkout):
    place = gym_root(tmp_path, checkout)
    make, fill = install_steps(place, place / ".venv", {})
    assert make.arguments[-3:-1] == ["--python", ">=3.13.14"]
    mine, _ = install_steps(place, place / ".venv", {"python_version": "3.13.15"})
    assert mine.arguments[-3:-1] == ["--python", "3.13.15"]
    if checkout:
        assert (fill.arguments[-2:], fill.requirements) == (["-r", "requirements.txt"], "")
    else:  # there is no project two directories up: the same release comes from the index
        assert (fill.arguments[-2:], fill.requirements) == (["-r", "-"], "nemo-gym==0.7.0\nrequests")


@pytest.mark.parametrize("checkout", [True, False])
def test_another_version_of_nemo_gym_is_named(tmp_path, checkout):
    gym_root(tmp_path, checkout, version="0.9.1")
    roots = SearchRoots.of(cwd=tmp_path, environ={})
    (warning,) = resolve([], [], roots).warnings
    assert "nemo-gym 0.9.1, which was not tried with Roundhouse. Tried: 0.5.1, 0.6.0, 0.7.0" in warning


# -- command line ---------------------------------------------------------------------------------------------------


def test_validate_tells_all_problems_and_ends_with_1(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    good = CliRunner().invoke(app, ["validate", "w.yaml", "--ours", "--json"])
    assert (good.exit_code, json.loads(good.stdout)["problems"]) == (0, [])
    bad = CliRunner().invoke(app, ["validate", "w.yaml", "++a=???", "++b=${nowhere}", "--json"])
    assert bad.exit_code == 1
    assert len(json.loads(bad.stdout)["problems"]) == 1
    plain = CliRunner().invoke(app, ["validate", "w.yaml"])
    assert (plain.exit_code, "3 servers, 2 problems" in plain.stdout) == (1, True)


def test_a_dry_run_prints_the_configuration_and_starts_nothing(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(
        "roundhouse.plugins.nemo_gym.servers.start.run", lambda *_, **__: pytest.fail("servers are started")
    )
    told = CliRunner().invoke(app, ["start", "w.yaml", "--ours", "++dry_run=true"])
    assert told.exit_code == 0
    assert set(yaml.safe_load(told.stdout)) > {"weather", "weather_agent", "policy_model", "head_server"}
    assert "sesame" not in told.stdout
    wrong = CliRunner().invoke(app, ["start", "w.yaml", "--ours", "++dry_run=true", "++a=???"])
    assert isinstance(wrong.exception, ConfigError)


def test_resolve_prints_the_merged_configuration_without_secrets(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    told = CliRunner().invoke(app, ["resolve", "w.yaml", "--ours", "++policy_model_name=tiny", "~weather_agent"])
    assert told.exit_code == 0
    assert "policy_model_name: tiny" in told.stdout
    assert "sesame" not in told.stdout
    assert "weather_agent" not in told.stdout


def test_a_new_environment_passes_its_test_and_its_configuration_is_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["init", "word_reversal"])
    assert told.exit_code == 0
    assert len((tmp_path / "word_reversal" / "example.jsonl").read_text().splitlines()) == 5
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "word_reversal"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout
    valid = CliRunner().invoke(app, ["validate", "word_reversal/gym.yaml", "++policy_base_url=http://127.0.0.1:1/v1"])
    assert valid.exit_code == 0, valid.stdout


def test_a_file_that_is_no_gym_configuration_is_not_called_valid(tmp_path, monkeypatch):
    """It was "0 servers, 0 problems" and exit code 0."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("run_id: mine\niterations: 3\n")
    told = CliRunner().invoke(app, ["validate", "run.yaml"])
    assert told.exit_code == 1
    assert "problem: no server is in it." in told.stdout
    assert "roundhouse train FILE --dry-run" in told.stdout


def test_a_new_environment_can_be_trained_as_it_stands_from_any_directory_and_on_own_data(tmp_path, monkeypatch):
    """It had no run, no demonstrations for a warm start, and needed PYTHONPATH. Two of its files are enough."""
    made = CliRunner().invoke(app, ["init", "word_reversal", "--minimal", "--directory", str(tmp_path / "there")])
    assert [Path(line).name for line in made.stdout.splitlines()] == ["environment.py", "run.yaml"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_yaml = tmp_path / "there/word_reversal/run.yaml"
    told = CliRunner().invoke(roundhouse, ["train", str(run_yaml), "--dry-run"])
    assert told.exit_code == 0, told.exception
    config = load_config(run_yaml, ["policy.steps=2"])
    environment = load(config.environment)
    for shown in environment.demonstrations("train", 20, 1.0, seed=0):
        row = next(row for row in environment.tasks("train") if row["responses_create_params"]["input"] == shown[:1])
        assert asyncio.run(verdict_on(LocalEnvironmentClient(environment), row, shown[-1]["content"])).reward == 1.0
    report = make_starting_policy(config.policy, environment, 0, tmp_path / "policy")
    assert report.steps == 2
    for split in ("train", "heldout"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"word": f"my{split}"}) + "\n")
    files = ", ".join(f"{split}: {tmp_path / split}.jsonl" for split in ("train", "heldout"))
    own = load(load_config(run_yaml, [f"environment.parameters={{{files}}}"]).environment)
    assert [row["word"] for row in own.tasks("heldout")] == ["myheldout"]


@pytest.mark.parametrize("name", ["Words", "1st", "a-b", "class", ""])
def test_a_name_that_no_module_can_have_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be an environment's name"):
        write_environment(name, tmp_path)


def test_an_existing_directory_is_left_alone(tmp_path):
    write_environment("words", tmp_path)
    with pytest.raises(ConfigError, match="exists"):
        write_environment("words", tmp_path)
