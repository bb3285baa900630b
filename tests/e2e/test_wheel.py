"""An installed wheel, in a directory with folders `flows` and `tasks` of the user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from roundhouse.store.run import load_run
from tests.e2e.copies import ROOT, copy_repository

FOREIGN = 'raise RuntimeError("a folder of the user was imported")\n'
SHIPPED = ("configs", "k8s", "images", "prefect.yaml")


def pip_of(commands: Path) -> list[str]:
    """Return the command of this environment's pip for another environment."""
    return [sys.executable, "-m", "pip", "--python", str(commands / "python")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy: a build directory of an earlier build would add its files."""
    directory = tmp_path_factory.mktemp("wheel")
    source = copy_repository(directory / "source")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    build = ["wheel", *options, "--wheel-dir", str(directory), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment that sees the present packages. Return its folder of commands."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    # Paths of a .pth file are searched, but the .pth files in them are not read: this checkout stays out.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    for script in Path(sys.executable).parent.iterdir():
        first, _, rest = (script.read_bytes() if script.is_file() and not script.is_symlink() else b"").partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            command = home / "bin" / script.name
            command.write_bytes(f"#!{home / 'bin/python'}\n".encode() + rest)
            command.chmod(0o755)
    (home / "bin/roundhouse").unlink()
    options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([*pip_of(home / "bin"), "install", *options, str(wheel)], check=True)
    return home / "bin"


@pytest.fixture
def type_in(installed: Path, tmp_path: Path) -> Callable[..., str]:
    """Run a command of the environment in a directory with foreign folders, and return its output."""
    (tmp_path / "mlflow.py").write_text(FOREIGN)
    for name in ("flows", "tasks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(FOREIGN)
    hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"OMP_NUM_THREADS": "1"}

    def run(command: str, *words: str) -> str:
        done = subprocess.run(
            [installed / command, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


@pytest.mark.nightly
def test_the_wheel_has_every_file_that_commands_read_and_no_general_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", *SHIPPED], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {f"roundhouse/data/{name}" for name in listed.split()} - names == set()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "roundhouse",
        "roundhouse_flows",
        "roundhouse_tasks",
    }


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_an_installed_wheel_trains_in_a_directory_with_foreign_folders(
    type_in: Callable[..., str], installed: Path, tmp_path: Path
) -> None:
    places = type_in(
        "python", "-P", "-c", "import roundhouse, roundhouse_flows as f; print(roundhouse.__file__, f.__file__)"
    )
    assert all(place.startswith(str(installed.parent)) for place in places.split())
    complaints = subprocess.run([*pip_of(installed), "check"], capture_output=True, text=True, check=False).stdout
    assert re.findall(r"^roundhouse .*", complaints, re.MULTILINE) == []
    assert "run_id: quickstart" in type_in("roundhouse", "quickstart", "--dry-run")
    try:
        type_in("roundhouse", "up")
        type_in("roundhouse", "gym", "init", "words")
        keys = ("iterations=2", "policy.steps=40", "generation.backend=trainer")
        type_in("roundhouse", "train", "words/run.yaml", *(word for key in keys for word in ("--set", key)))
        assert load_run(str(tmp_path / ".roundhouse/store"), "words").checkpoint_versions() == [0, 1, 2]
        exported = "import roundhouse as rh; print(rh.open_run('words').checkpoint(1).export('model', 'bfloat16'))"
        assert type_in("python", "-P", "-c", exported) == "model\n"
        assert (tmp_path / "model/config.json").is_file()
    finally:
        type_in("roundhouse", "down")
