"""The packages of a plug-in are installed into a separate interpreter, whole or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, InfraError
from roundhouse.infra import interpreters
from roundhouse.infra.interpreters import installed_python
from roundhouse.rollout.clients import open_environment
from tests.plugins.packages import install

DECLARATION = """
from roundhouse.plugins import Plugin
TINY = Plugin("json:loads", packages=({wheel!r},))
"""


def installed(*words: str) -> str:
    done = CliRunner().invoke(app, ["plugins", "install", *words])
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package for the interpreter of the plug-in `tiny`, and an empty home for interpreters."""
    wheel = tmp_path / "rh_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rh_tiny.py", "ANSWER = 7\n")
        archive.writestr("rh_tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: rh-tiny\nVersion: 1.0\n")
        archive.writestr(
            "rh_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("rh_tiny-1.0.dist-info/RECORD", "")
    site = tmp_path / "site"
    install(
        site, "rh-plugin", {"environment.tiny": "rh_plugin:TINY"}, {"rh_plugin": DECLARATION.format(wheel=str(wheel))}
    )
    monkeypatch.delitem(sys.modules, "rh_plugin", raising=False)  # an earlier test's, with another wheel
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return wheel


def answer(python: str) -> str:
    return subprocess.run(
        [python, "-c", "import rh_tiny; print(rh_tiny.ANSWER)"], capture_output=True, text=True
    ).stdout


def test_an_interrupted_installation_is_not_used_and_the_same_command_repairs_it(wheel: Path, tmp_path: Path) -> None:
    python = installed_after(wheel)
    (tmp_path / "data/roundhouse/interpreters/tiny/complete").unlink()
    Path(python).unlink()
    with pytest.raises(ConfigError, match=r"tiny has no complete installation. Run `roundhouse plugins install tiny`"):
        installed_python("tiny")
    assert installed_after(wheel) == python


@pytest.mark.real
def test_without_uv_the_interpreter_is_made_by_venv_and_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "_uv", lambda: None)
    installed_after(wheel)


def installed_after(wheel: Path) -> str:
    assert installed("tiny").endswith("interpreters/tiny/bin/python\n")
    python = installed_python("tiny")
    assert answer(python) == "7\n"
    assert not shutil.which("rh_tiny"), "nothing reaches Roundhouse's interpreter"
    return python


def test_a_failed_step_is_named_and_leaves_nothing_that_is_used(wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(InfraError, match=r"rh_tiny-1\.0.*ended with \d+\. Its output above has the cause"):
        installed("tiny")
    with pytest.raises(ConfigError, match="no complete installation"):
        installed_python("tiny")


@pytest.mark.usefixtures("wheel")
def test_a_configuration_without_an_interpreter_names_the_command_that_installs_it() -> None:
    keys: Any = {"kind": "verifiers", "env": {"taskset": {"id": "reverse-text"}}}
    with pytest.raises(ConfigError, match="Run `roundhouse plugins install verifiers`"):
        open_environment(parse_config({"run_id": "r", "environment": keys}).environment)


@pytest.mark.usefixtures("wheel")
def test_packages_of_our_interpreter_are_shown_as_a_command_and_other_names_are_refused() -> None:
    assert "-m pip install 'roundhouse[textarena]'" in installed("textarena")
    with pytest.raises(ConfigError, match=r"'calculator' is not a plug-in that needs packages. Available: .*verifiers"):
        installed("calculator")
