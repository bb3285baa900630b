"""Commands that start the servers, and virtual environments of foreign servers.

Invariant: secrets reach a server only through its environment, never through its command line, which every user of the
machine can read. A foreign server is started as NeMo Gym does it: in its directory, with the Python of its virtual
environment.

    <root>/resources_servers/weather/           app.py, requirements.txt or pyproject.toml, .venv/
    [<.venv>/bin/python, app.py]                NEMO_GYM_CONFIG_DICT, NEMO_GYM_CONFIG_PATH, NEMO_GYM_EXTRA_ROOTS, PYTHONPATH

Virtual environments are made with uv. A failed step ends the installation with its output. A half-made environment is
completed and not used, because a file next to it marks it until every step has succeeded.

    uv venv --allow-existing --python <version> <venv>
    uv pip install --python <venv>/bin/python [--override overrides.txt] -r requirements.txt | -e .   <head_server_deps>

The version is `python_version` of the configuration, or the range that NeMo Gym itself requires. The servers of an
installed NeMo Gym (not a checkout) install the package of the same version in place of the directory above them.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError, InfraError
from roundhouse.infra.processes import end_of_log
from roundhouse.plugins.nemo_gym.config.instances import Instance
from roundhouse.plugins.nemo_gym.config.package import gym_package
from roundhouse.plugins.nemo_gym.config.resolve import Resolution
from roundhouse.plugins.nemo_gym.config.sources import EXTRA_ROOTS, SearchRoots
from roundhouse.plugins.nemo_gym.servers.own_server import CONFIG_PATH

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
    """Options for running foreign servers."""

    python: Path | None = None
    """One interpreter for all of them, instead of a virtual environment each."""
    install: bool = False
    """Make or complete their virtual environments with uv."""


def commands(
    resolution: Resolution, roots: SearchRoots, foreign: Foreign, environ: Mapping[str, str] = os.environ
) -> tuple[list[Command], list[str]]:
    """Return a command for every server that we start, and the obstacles of the others."""
    server_commands: list[Command] = []
    problems: list[str] = []
    shared = {
        **environ,
        EXTRA_ROOTS: os.pathsep.join(str(root) for root in roots.roots),
    }
    for instance in resolution.instances:
        environment = {**shared, CONFIG_PATH: instance.name}
        if instance.kind == "own":
            arguments = (sys.executable, "-P", "-m", "roundhouse.plugins.nemo_gym.servers.own_server")
            server_commands.append(Command(instance, arguments, Path.cwd(), environment))
        elif instance.kind == "foreign":
            command = _foreign(instance, resolution, roots, foreign, environment)
            if isinstance(command, str):
                problems.append(command)
            else:
                server_commands.append(command)
    return server_commands, problems


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
            f"{instance.name}: {python} does not exist. Make the virtual environments with --install (needs uv), or run all "
            "foreign servers with one interpreter: --python."
        )
    root = directory.parent.parent
    package = gym_package(root)
    # The packages next to an installed NeMo Gym belong to another interpreter, unless that one runs the server
    shared = [] if package and not package.is_checkout and foreign.python is None else [str(root)]
    paths = [str(directory), *shared, environment.get("PYTHONPATH", "")]
    variables = {
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VIRTUAL_ENV": str(python.parent.parent),
        "PATH": os.pathsep.join([str(python.parent), environment.get("PATH", "")]),
        "UV_CACHE_DIR": str(resolution.tree["uv_cache_dir"]),
        **({"UV_LOCK_TIMEOUT": str(seconds)} if (seconds := resolution.tree.get("uv_lock_timeout_seconds")) else {}),
        "PYTHONUNBUFFERED": "1",
    }
    return Command(instance, (str(python), entrypoint), directory, variables, None if foreign.python else venv)


def venv_of(directory: Path, venv_root: object) -> Path:
    """Return the directory of a foreign server's virtual environment: next to it, or under `uv_venv_dir`."""
    if isinstance(venv_root, str) and venv_root and Path(venv_root).resolve() != directory.parent.parent.resolve():
        return Path(venv_root).resolve() / directory.parent.name / directory.name / ".venv"
    return directory / ".venv"


INSTALL_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class InstallStep:
    """One command, and the text that it reads."""

    arguments: list[str]
    requirements: str = ""


def install_steps(directory: Path, venv: Path, settings: Mapping[str, Any]) -> list[InstallStep]:
    """Return the commands that make an environment.

    Raises:
        ConfigError: the directory has both project files.
    """
    requirements, project = (directory / "requirements.txt").exists(), (directory / "pyproject.toml").exists()
    if requirements and project:
        raise ConfigError(f"{directory} has both requirements.txt and pyproject.toml; keep one of them.")
    package = gym_package(directory.parent.parent)
    version = settings.get("python_version") or (package and package.requires_python) or platform.python_version()
    verbose = ["-v"] if settings.get("pip_install_verbose") else []
    pip = ["uv", "pip", "install", *verbose, "--python", str(venv / "bin" / "python")]
    pinned = [str(one) for one in settings.get("head_server_deps") or []]
    override = ["--override", "overrides.txt"] if requirements and (directory / "overrides.txt").exists() else []
    steps = [InstallStep(["uv", "venv", "--seed", "--allow-existing", "--python", str(version), str(venv)])]
    if package is None or package.is_checkout:
        target = ["-r", "requirements.txt"] if requirements else ["-e", "."]
        return [*steps, InstallStep([*pip, *override, *target, *pinned])]
    release = f"nemo-gym=={package.version}"
    if not requirements:
        return [*steps, InstallStep([*pip, release]), InstallStep([*pip, "--no-sources", "-e", ".", *pinned])]
    lines = (directory / "requirements.txt").read_text().splitlines()
    text = "\n".join([release, *(line for line in lines if "../.." not in line)])
    return [*steps, InstallStep([*pip, *override, "-r", "-", *pinned], text)]


async def install(
    directory: Path, venv: Path, settings: Mapping[str, Any], environment: Mapping[str, str], log: Path
) -> bool:
    """Make the environment. Return False if `skip_venv_if_present` is true and it exists.

    Raises:
        InfraError: uv is missing, or a step failed: with the end of its output.
    """
    unfinished = venv.with_name(f"{venv.name}.unfinished")
    present = (venv / "bin" / "python").exists() and (venv / "bin" / "activate").exists()
    if settings.get("skip_venv_if_present") and present and not unfinished.exists():
        return False
    if (uv := shutil.which("uv", path=environment.get("PATH"))) is None:
        raise InfraError("Virtual environments are made with uv, which is not on PATH. Install it (pip install uv).")
    venv.parent.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    with log.open("ab") as output:
        for step in install_steps(directory, venv, settings):
            output.write(f"$ {' '.join(step.arguments)}\n{step.requirements}".encode())
            output.flush()
            await _run(step, uv, directory, environment, output, log)
    unfinished.unlink()
    return True


async def _run(
    step: InstallStep, uv: str, directory: Path, environment: Mapping[str, str], output: Any, log: Path
) -> None:
    command = " ".join(step.arguments)
    process = await asyncio.create_subprocess_exec(
        uv,
        *step.arguments[1:],
        cwd=directory,
        env=dict(environment),
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        await asyncio.wait_for(process.communicate(step.requirements.encode()), INSTALL_SECONDS)
    except TimeoutError as error:
        raise InfraError(f"{command} did not end within {INSTALL_SECONDS:g} s; its output is in {log}.") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise InfraError(f"{command} in {directory} ended with {process.returncode}:\n{end_of_log(log, 15)}")
