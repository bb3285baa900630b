"""Setting up: uv is used only as pip would be, and pytest's verdict is not lost on the way through make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def uv_sources(tmp_path: Path, settings: str) -> subprocess.CompletedProcess[str]:
    """`tools/uv_sources.py` under a pip configuration of our own."""
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\n{settings}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "uv_sources.py")],
        env={**environment, "PIP_CONFIG_FILE": str(configuration), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_uv_is_told_where_pip_looks(tmp_path: Path) -> None:
    result = uv_sources(
        tmp_path,
        "index-url = https://a.test/simple\nextra-index-url = https://b.test/simple https://c.test/simple\n"
        "find-links = /opt/wheels\ncert = /etc/cert.pem\ntimeout = 9",
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.split()
    for pair in (
        ["--default-index", "https://a.test/simple"],
        ["--index", "https://b.test/simple"],
        ["--index", "https://c.test/simple"],
        ["--find-links", "/opt/wheels"],
    ):
        assert pair in [lines[at : at + 2] for at in range(len(lines))]
    assert "SSL_CERT_FILE=/etc/cert.pem" in lines


def test_a_setting_that_uv_may_not_honour_means_pip(tmp_path: Path) -> None:
    result = uv_sources(tmp_path, "constraint = /etc/constraints.txt")
    assert result.returncode == 3
    assert "constraint" in result.stderr


def test_a_python_that_is_too_old_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12"):
        fake = tmp_path / name
        fake.write_text('#!/bin/sh\ncase "$*" in *--version*) echo Python 3.9.2;; *) exit 1;; esac\n')
        fake.chmod(0o755)
    copy = tmp_path / "checkout"
    (copy / "tools").mkdir(parents=True)
    for name in ("requirements.lock", "pyproject.toml", "tools/setup_environment.sh", "tools/uv_sources.py"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    result = subprocess.run(
        ["bash", "tools/setup_environment.sh"],
        cwd=copy,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "found Python 3.9.2" in result.stderr
    assert "make setup PYTHON=" in result.stderr


@pytest.mark.parametrize(("body", "code", "closing"), [("assert True", 0, "1 passed"), ("assert False", 2, "1 failed")])
def test_ci_ends_with_the_closing_line_of_pytest_and_its_verdict(
    tmp_path: Path, body: str, code: int, closing: str
) -> None:
    """Through the real Makefile and .ci/run, in a checkout whose set-up is this interpreter."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup_environment.sh").write_text("#!/bin/sh\n")
    (tmp_path / "tools" / "setup_environment.sh").chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "test_one.py").write_text(f"def test_one():\n    {body}\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MAKE"))}
    result = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == code, result.stdout
    assert closing in result.stdout.splitlines()[-1]
