"""Install the foreign packages that contract tests run against, each into an environment of its own.

    .venv/bin/python tools/contract_environments.py [NAME …]      all lines of tests/contracts/packages.txt, or these

Invariant: `<folder>/<name>/complete` holds the line that the environment was made from, and is written last. While it equals
the line of the list, the environment stays. A package that cannot be installed leaves no such file, and its reason in
`<folder>/<name>.log`: its tests are skipped by its name. The folder is `.contracts`, or that of the variable CONTRACTS_DIR,
which several checkouts can share.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "tests" / "contracts" / "packages.txt"
UV = Path(sys.executable).parent / "uv"


@dataclass(frozen=True)
class Package:
    """One line of the list."""

    name: str
    python: str
    arguments: tuple[str, ...]
    """Requirements and options of `uv pip install`."""

    @property
    def line(self) -> str:
        return " ".join((self.name, self.python, *self.arguments))

    @property
    def directory(self) -> Path:
        return contracts_folder() / self.name

    @property
    def interpreter(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def log(self) -> Path:
        return contracts_folder() / f"{self.name}.log"

    def is_installed(self) -> bool:
        stamp = self.directory / "complete"
        return stamp.exists() and stamp.read_text() == self.line


def contracts_folder() -> Path:
    """Return the folder of the environments."""
    return Path(os.environ.get("CONTRACTS_DIR") or ROOT / ".contracts").resolve()


def read_packages(text: str) -> dict[str, Package]:
    """Return the packages of a list, by name.

    Raises:
        ValueError: a line has fewer than three parts, or a name is listed twice.
    """
    packages: dict[str, Package] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        parts = re.split(r"(?:^|\s)#", line)[0].split()  # a "#" within a word is part of a URL
        if not parts:
            continue
        if len(parts) < 3 or parts[0] in packages:
            raise ValueError(f"packages.txt:{number}: write <name> <Python> <requirements>, each name once: {line!r}")
        packages[parts[0]] = Package(parts[0], parts[1], tuple(parts[2:]))
    return packages


def install(package: Package) -> bool:
    """Make the environment anew. Return False, with the reason in the log, if a step fails."""
    shutil.rmtree(package.directory, ignore_errors=True)
    package.directory.parent.mkdir(parents=True, exist_ok=True)
    options, variables = _index_options()
    python = ["--python", str(package.interpreter)]
    steps = (
        [str(UV), "venv", "--no-config", "--python", find_python(package.python), str(package.directory)],
        [str(UV), "pip", "install", *options, *python, *package.arguments],
        [str(UV), "pip", "freeze", *python],
    )
    with package.log.open("w") as log:
        for step in steps:
            if subprocess.run(step, stdout=log, stderr=log, env={**os.environ, **variables}, check=False).returncode:
                return False
    (package.directory / "complete").write_text(package.line)
    return True


def find_python(version: str) -> str:
    """Return an interpreter of the version on PATH or of pyenv; else the version, for uv to find or to download."""
    candidates = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))]
    for candidate in filter(None, candidates):
        # A shim of pyenv is on PATH for each version that is installed, and fails for all but the selected ones
        probe = subprocess.run([str(candidate), "--version"], capture_output=True, text=True, check=False)
        if probe.returncode == 0 and probe.stdout.startswith(f"Python {version}."):
            return str(candidate)
    return version


def _index_options() -> tuple[list[str], dict[str, str]]:
    """Return pip's own configuration of indexes as options and variables of uv."""
    script = [sys.executable, str(ROOT / "tools" / "uv_sources.py")]
    reply = subprocess.run(script, capture_output=True, text=True, check=False)
    lines = reply.stdout.splitlines() if reply.returncode == 0 else []
    variables = dict(line.split("=", 1) for line in lines if line.startswith("SSL_CERT_FILE="))
    return [line for line in lines if not line.startswith("SSL_CERT_FILE=")], variables


def main(names: list[str]) -> int:
    packages = read_packages(PACKAGES.read_text())
    if unknown := set(names) - packages.keys():
        sys.stderr.write(f"contracts: no package {', '.join(sorted(unknown))}; there are {', '.join(packages)}\n")
        return 2
    for package in packages.values():
        if (names and package.name not in names) or package.is_installed():
            continue
        sys.stdout.write(f"contracts: installing {package.name}\n")
        sys.stdout.flush()
        if not install(package):
            lines = package.log.read_text().strip().splitlines() or ["uv reported nothing"]
            sys.stdout.write(f"contracts: {package.name} is not installed, its tests are skipped: {lines[-1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
