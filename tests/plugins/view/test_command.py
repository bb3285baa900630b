"""The command `view`: its line in the list of commands, and its refusals."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundhouse import plugins
from roundhouse.cli import app
from roundhouse.cli.options import exit_code
from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.plugins.view import PLUGINS
from tests.sql.stores import write_run


def test_the_line_of_the_command_is_its_help() -> None:
    text = inspect.getdoc(plugins.factory("command", "view"))
    assert text is not None
    assert PLUGINS["command.view"].traits == " ".join(text.split())


@pytest.mark.parametrize("command", ["view nosuch", "view r --iteration 99"])
def test_an_unknown_run_or_iteration_ends_with_the_code_of_the_store(command: str, tmp_path: Path) -> None:
    write_run(str(tmp_path / "store"), iterations=1)
    error = CliRunner().invoke(app, [*shlex.split(command), "--store", str(tmp_path / "store")]).exception
    assert isinstance(error, RoundhouseError), error
    assert exit_code(error) == 74, error


def test_a_store_that_does_not_exist_is_refused_with_its_path(tmp_path: Path) -> None:
    error = CliRunner().invoke(app, ["view", "--store", str(tmp_path / "none")]).exception
    assert isinstance(error, StoreError)
    assert f"No store at {tmp_path / 'none'}. Name one with --store or ROUNDHOUSE_STORE" in str(error)
