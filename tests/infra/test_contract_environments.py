"""The environments of foreign packages: one line each, and a missing one skips its tests by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.conftest import environments

ROOT = Path(__file__).parents[2]


def test_one_line_adds_a_package_with_its_python_and_its_options(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CONTRACTS_DIR", str(tmp_path))
    packages = environments.read_packages("# comment\n\npeer-1  3.12  peer@git+https://a/b#subdirectory=c --x  # why\n")
    assert packages["peer-1"].arguments == ("peer@git+https://a/b#subdirectory=c", "--x")
    assert packages["peer-1"].interpreter == tmp_path / "peer-1" / "bin" / "python"


@pytest.mark.parametrize("text", ["peer-1 3.12\n", "peer-1 3.12 peer==1\npeer-1 3.12 peer==2\n"])
def test_an_incomplete_or_repeated_line_is_refused_by_its_number(text: str) -> None:
    with pytest.raises(ValueError, match=rf"packages.txt:{text.count(chr(10))}: "):
        environments.read_packages(text)


def test_an_environment_of_another_version_or_half_made_is_not_used(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CONTRACTS_DIR", str(tmp_path))
    old, new = (environments.read_packages(f"peer 3.12 peer=={version}")["peer"] for version in (1, 2))
    old.directory.mkdir()
    assert not old.is_installed()
    (old.directory / "complete").write_text(old.line)
    assert (old.is_installed(), new.is_installed()) == (True, False)


@pytest.mark.real
def test_a_contract_test_without_its_package_is_skipped_by_name(tmp_path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "contract", "tests/contracts", "-p", "no:cacheprovider"]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CONTRACTS_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
    assert "x nemo-gym-0.7.0 is not installed (make contracts CONTRACTS=nemo-gym-0.7.0" in result.stdout
    assert " passed" not in result.stdout
