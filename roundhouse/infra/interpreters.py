"""Separate interpreters for plug-ins with packages that conflict with those of Roundhouse.

    ~/.local/share/roundhouse/interpreters/<name>/bin/python        with XDG_DATA_HOME: below that directory

Invariant: an interpreter is used only while its file `complete` has the requirements of the plug-in's declaration. The file is
written last: after an interrupted installation, or with a plug-in for another version, the interpreter is made anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from roundhouse.errors import ConfigError, InfraError
from roundhouse.plugins import ROLES, Plugin, find, names

COMPLETE = "complete"


def installed_python(name: str) -> str:
    """Return the separate interpreter of a plug-in.

    Raises:
        ConfigError: it is not installed, or has other versions than the plug-in needs.
    """
    place = _directory(name)
    if not _is_complete(place, find_installable(name).packages):
        raise ConfigError(f"{name}: {place} has no complete installation. Run `roundhouse plugins install {name}`.")
    return str(_python(place))


def find_installable(name: str) -> Plugin:
    """Return the plug-in of a name that declares packages.

    Raises:
        ConfigError: no such plug-in does; the error names all of them.
    """
    for known, plugin in _installable():
        if known == name:
            return plugin
    available = ", ".join(known for known, _ in _installable())
    raise ConfigError(f"{name!r} is not a plug-in that needs packages. Available: {available}.")


def install_interpreter(name: str, packages: Sequence[str], more: Sequence[str]) -> Path:
    """Install packages into the separate interpreter of a plug-in, which is made if it is not complete, and return it.

    Args:
        packages: those of the declaration.
        more: further packages, such as environments.

    Raises:
        InfraError: a step failed, with its output on the terminal.
    """
    place = _directory(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(place, packages):
            (place / COMPLETE).unlink(missing_ok=True)
            _run([*_venv(), str(place)], name)
            _run([*_pip(place), *packages], name)
            (place / COMPLETE).write_text(json.dumps(packages))
        if more:
            _run([*_pip(place), *more], name)
    return _python(place)


def _installable() -> Iterator[tuple[str, Plugin]]:
    for role in ROLES:
        for name in names(role):
            try:
                plugin = find(role, name)
            except ConfigError:  # a broken package disturbs no other plug-in
                continue
            if plugin.packages or plugin.extra:
                yield name, plugin


def _directory(name: str) -> Path:
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "roundhouse" / "interpreters" / name


def _is_complete(place: Path, packages: Sequence[str]) -> bool:
    stamp = place / COMPLETE
    return stamp.exists() and stamp.read_text() == json.dumps(packages)


def _python(place: Path) -> Path:
    return place / "bin" / "python"


def _uv() -> str | None:
    ours = Path(sys.executable).with_name("uv")
    return str(ours) if ours.exists() else shutil.which("uv")


def _venv() -> list[str]:
    uv = _uv()
    return (
        [sys.executable, "-P", "-m", "venv", "--clear"]
        if uv is None
        else [uv, "venv", "--clear", "--python", sys.executable]
    )


def _pip(place: Path) -> list[str]:
    uv, python = _uv(), str(_python(place))
    return [python, "-P", "-m", "pip", "install"] if uv is None else [uv, "pip", "install", "--python", python]


def _run(command: Sequence[str], name: str) -> None:
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise InfraError(
            f"`{' '.join(command)}` ended with {code}. Its output above has the cause: a network without the packages, or "
            f"packages for another Python than {version}. Remove it, and run `roundhouse plugins install {name}` again."
        )
