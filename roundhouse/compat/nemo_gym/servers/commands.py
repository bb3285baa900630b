"""How the process of each server is started, and the virtual environments of foreign ones.

Invariant: secrets reach a server through its environment alone, never through its command line, which every user of the machine
can read. A foreign server is started as NeMo Gym does it: in its own directory, with the Python of its virtual environment.

    <root>/resources_servers/weather/           app.py, requirements.txt or pyproject.toml, .venv/
    [<.venv>/bin/python, app.py]                NEMO_GYM_CONFIG_DICT, NEMO_GYM_CONFIG_PATH, NEMO_GYM_EXTRA_ROOTS, PYTHONPATH

Virtual environments are made with uv: a step that fails ends the installation with its output; an environment that was left
half-made is completed and not used, since a file next to it says so until every step succeeded.

    uv venv --allow-existing --python <version> <venv>
    uv pip install --python <venv>/bin/python [--override overrides.txt] -r requirements.txt | -e .   <head_server_deps>
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundhouse.compat.nemo_gym.config.instances import Instance
from roundhouse.compat.nemo_gym.config.resolve import Resolution
from roundhouse.compat.nemo_gym.config.sources import EXTRA_ROOTS, SearchRoots
from roundhouse.compat.nemo_gym.servers.own_server import CONFIG_PATH
from roundhouse.errors import ConfigError, InfraError
from roundhouse.infra.processes import end_of_log

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
    """Where a foreign server's virtual environment is: next to it, or under `uv_venv_dir`."""
    if isinstance(venv_root, str) and venv_root and Path(venv_root).resolve() != directory.parent.parent.resolve():
        return Path(venv_root).resolve() / directory.parent.name / directory.name / ".venv"
    return directory / ".venv"


INSTALL_SECONDS = 1800.0


def install_steps(directory: Path, venv: Path, settings: Mapping[str, Any]) -> list[list[str]]:
    """The commands that make an environment.

    Raises:
        ConfigError: the directory has both project files.
    """
    requirements, project = (directory / "requirements.txt").exists(), (directory / "pyproject.toml").exists()
    if requirements and project:
        raise ConfigError(f"{directory} has both requirements.txt and pyproject.toml; keep one of them.")
    target = ["-r", "requirements.txt"] if requirements else ["-e", "."]
    if requirements and (directory / "overrides.txt").exists():
        target = ["--override", "overrides.txt", *target]
    verbose = ["-v"] if settings.get("pip_install_verbose") else []
    pinned = [str(one) for one in settings.get("head_server_deps") or []]
    return [
        ["uv", "venv", "--seed", "--allow-existing", "--python", str(settings["python_version"]), str(venv)],
        ["uv", "pip", "install", *verbose, "--python", str(venv / "bin" / "python"), *target, *pinned],
    ]


async def install(
    directory: Path, venv: Path, settings: Mapping[str, Any], environment: Mapping[str, str], log: Path
) -> bool:
    """Make the environment; False where `skip_venv_if_present` is true and it was there.

    Raises:
        InfraError: uv is missing, or a step failed: with the end of its output.
    """
    unfinished = venv.with_name(f"{venv.name}.unfinished")
    present = (venv / "bin" / "python").exists() and (venv / "bin" / "activate").exists()
    if settings.get("skip_venv_if_present") and present and not unfinished.exists():
        return False
    if shutil.which("uv", path=environment.get("PATH")) is None:
        raise InfraError("Virtual environments are made with uv, which is not on PATH. Install it (pip install uv).")
    venv.parent.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    with log.open("ab") as output:
        for step in install_steps(directory, venv, settings):
            output.write(f"$ {' '.join(step)}\n".encode())
            output.flush()
            await _run(step, directory, environment, output, log)
    unfinished.unlink()
    return True


async def _run(step: list[str], directory: Path, environment: Mapping[str, str], output: Any, log: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *step,
        cwd=directory,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        code = await asyncio.wait_for(process.wait(), INSTALL_SECONDS)
    except TimeoutError as error:
        raise InfraError(
            f"{' '.join(step)} did not end within {INSTALL_SECONDS:g} s; its output is in {log}."
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise InfraError(f"{' '.join(step)} in {directory} ended with {code}:\n{end_of_log(log, 15)}")
