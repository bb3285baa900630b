"""Virtual environments of foreign servers, made with uv.

Invariant: a step that fails ends the installation with its output; an environment that was left half-made is completed and not
used, since a file beside it says so until every step went well.

    uv venv --allow-existing --python <version> <venv>
    uv pip install --python <venv>/bin/python [--override overrides.txt] -r requirements.txt | -e .   <head_server_deps>
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundhouse.errors import ConfigError, InfraError

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
        raise InfraError(f"{' '.join(step)} in {directory} ended with {code}:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
