"""README's commands work: `make quickstart`, then each line under "Commands", in a fresh directory."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.copies import ROOT, copy_repository

SECTION = re.search(r"^## Commands\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
assert SECTION is not None
LINES = [line.partition("  #")[0].strip() for line in re.findall(r"^    (roundhouse .*)$", SECTION[1], re.MULTILINE)]
SERVES = "roundhouse view"
"""The one that runs until Ctrl-C."""

COMMAND_SECONDS, QUICKSTART_SECONDS = 600, 1200
"""Time limits of one command, so that the one that hangs is named."""

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A separate copy of the repository's files, with the packages of this environment."""
    directory = copy_repository(tmp_path_factory.mktemp("fresh") / "roundhouse")
    (directory / ".venv").symlink_to(ROOT / ".venv")
    yield directory
    run(directory, "roundhouse down")


def environment(directory: Path) -> dict[str, str]:
    commands = f"{directory / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": commands, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}


def run(directory: Path, command: str, seconds: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        shlex.split(command),
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


def serves_until_interrupted(directory: Path, command: str) -> None:
    process = subprocess.Popen(
        shlex.split(command), cwd=directory, env=environment(directory), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        assert httpx.get(address, timeout=30, follow_redirects=True).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
def test_the_quickstart_learns_and_every_command_after_it_works(fresh: Path) -> None:
    done = run(fresh, "make -o setup quickstart", QUICKSTART_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, after = map(float, re.search(r"Held-out reward (\S+) ± \S+ → (\S+)", done.stdout).groups())
    assert after > before + 0.3
    assert len(LINES) >= 15
    for line in LINES:
        if line.startswith(SERVES):
            serves_until_interrupted(fresh, line)
            continue
        done = run(fresh, line)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, line
