"""How the process of each server is started.

Invariant: secrets reach a server through its environment alone, never through its command line, which every user of the machine
can read. A foreign server is started as NeMo Gym does it: in its own directory, with the Python of its virtual environment.

    <root>/resources_servers/weather/           app.py, requirements.txt or pyproject.toml, .venv/
    [<.venv>/bin/python, app.py]                NEMO_GYM_CONFIG_DICT, NEMO_GYM_CONFIG_PATH, NEMO_GYM_EXTRA_ROOTS, PYTHONPATH
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roundhouse.compat.nemo_gym.config.instances import Instance
from roundhouse.compat.nemo_gym.config.resolve import Resolution
from roundhouse.compat.nemo_gym.config.sources import EXTRA_ROOTS, SearchRoots
from roundhouse.compat.nemo_gym.servers.own_server import CONFIG_PATH

PROJECT_FILES = ("requirements.txt", "pyproject.toml")
"""A directory is a foreign server's when it holds one of these."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start."""

    instance: Instance
    arguments: tuple[str, ...]
    directory: Path
    environment: dict[str, str]
    """The environment of the process, but for the configuration (`NEMO_GYM_CONFIG_DICT`), which is complete at its start."""
    venv: Path | None = None
    """Virtual environment of a foreign server, which may have to be made first."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """How foreign servers are run."""

    python: Path | None = None
    """One interpreter for all of them, instead of a virtual environment each."""
    install: bool = False
    """Make or complete their virtual environments with uv."""


def commands(
    resolution: Resolution, roots: SearchRoots, foreign: Foreign, environ: Mapping[str, str] = os.environ
) -> tuple[list[Command], list[str]]:
    """A command for every server that is ours to start, and what prevents the others."""
    found: list[Command] = []
    problems: list[str] = []
    shared = {
        **environ,
        EXTRA_ROOTS: os.pathsep.join(str(root) for root in roots.roots),
    }
    for instance in resolution.instances:
        environment = {**shared, CONFIG_PATH: instance.name}
        if instance.kind == "own":
            arguments = (sys.executable, "-m", "roundhouse.compat.nemo_gym.servers.own_server")
            found.append(Command(instance, arguments, Path.cwd(), environment))
        elif instance.kind == "foreign":
            command = _foreign(instance, resolution, roots, foreign, environment)
            if isinstance(command, str):
                problems.append(command)
            else:
                found.append(command)
    return found, problems


def _foreign(
    instance: Instance, resolution: Resolution, roots: SearchRoots, foreign: Foreign, environment: dict[str, str]
) -> Command | str:
    place = Path(instance.type, instance.implementation)
    directory = roots.find(place, PROJECT_FILES)
    if directory is None:
        looked = ", ".join(str(root) for root in roots.roots)
        return (
            f"{instance.name}: no directory {place} with {' or '.join(PROJECT_FILES)} under {looked}. Name NeMo Gym's checkout "
            "with --root, or your own directory with --search-dir."
        )
    entrypoint = str(instance.fields.entrypoint)
    if not (directory / entrypoint).is_file():
        return f"{instance.name}: entrypoint is {entrypoint!r}, which {directory} does not have."
    venv = venv_of(directory, resolution.tree.get("uv_venv_dir"))
    python = foreign.python or venv / "bin" / "python"
    if not python.exists() and (foreign.python or not foreign.install):
        return (
            f"{instance.name}: there is no {python}. Make the virtual environments with --install (needs uv), or run all "
            "foreign servers with one interpreter: --python."
        )
    paths = [str(directory), str(directory.parent.parent), environment.get("PYTHONPATH", "")]
    told = {
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VIRTUAL_ENV": str(python.parent.parent),
        "PATH": os.pathsep.join([str(python.parent), environment.get("PATH", "")]),
        "UV_CACHE_DIR": str(resolution.tree["uv_cache_dir"]),
        "PYTHONUNBUFFERED": "1",
    }
    return Command(instance, (str(python), entrypoint), directory, told, None if foreign.python else venv)


def venv_of(directory: Path, venv_root: object) -> Path:
    """Where a foreign server's virtual environment is: beside it, or under `uv_venv_dir`."""
    if isinstance(venv_root, str) and venv_root and Path(venv_root).resolve() != directory.parent.parent.resolve():
        return Path(venv_root).resolve() / directory.parent.name / directory.name / ".venv"
    return directory / ".venv"
