"""The base of environments in which the policy runs commands: a sandbox per rollout, of any kind.

Invariants: a rollout's sandbox starts with the files of its row and is closed with the session. Results of a command
within its limits are shown to the policy. A sandbox that cannot start or is lost fails the rollout, which is retried.

    class Chores(SandboxedEnvironment[Chore]):      generated problems (`generated.py`); their rows have `files`: text by path
        async def verify(self, session, row, response): … await session.read_files()
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from roundhouse.config.sandboxes import SandboxConfig
from roundhouse.environments.base import TaskRow, tool
from roundhouse.environments.generated import GeneratedEnvironment
from roundhouse.environments.sandboxes import CommandResult, FilesRefused, Sandbox, new_sandbox
from roundhouse.errors import ConfigError, InfraError

P = TypeVar("P")


class SandboxedEnvironment(GeneratedEnvironment[P]):
    """Generated problems with the tools `run` and `write`."""

    restoration = "replay"
    """Commands are run again on a new sandbox: it begins with the same files, and nothing outlives a command but files."""
    programs: tuple[str, ...] = ("sh", "tar")
    """Programs that a sandbox must have."""

    def __init__(self, problems: Iterable[P], heldout_fraction: float, sandbox: SandboxConfig) -> None:
        self.sandbox = sandbox
        super().__init__(problems, heldout_fraction)

    async def seed_session(self, row: TaskRow) -> Sandbox:
        return await self.sandbox_with({name: text.encode() for name, text in row["files"].items()})

    async def sandbox_with(self, files: dict[str, bytes]) -> Sandbox:
        """A started sandbox with these files.

        Raises:
            InfraError, FilesRefused
        """
        sandbox = new_sandbox(self.sandbox)
        try:
            await sandbox.start()
            await sandbox.write_files(files)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close_session(self, session: Sandbox) -> None:
        await session.close()

    @tool("Run a command in the working directory.", command="A line of sh.")
    async def run(self, session: Sandbox, command: str) -> str:
        return shown(await session.run(command))

    @tool("Write a file.", path="In the working directory.", content="The whole text.")
    async def write(self, session: Sandbox, path: str, content: str) -> str:
        try:
            await session.write_files({path: content.encode()})
        except FilesRefused as refused:
            return f"error: {refused}"
        return "written"

    def check_sandbox(self) -> None:
        """Start one sandbox, write and read the files of the first task, look for its programs, and end it.

        Raises:
            ConfigError: that does not work here.
        """
        files = {name: text.encode() for name, text in self.tasks("train")[0]["files"].items()}

        async def probe() -> tuple[dict[str, bytes], CommandResult]:
            sandbox = await self.sandbox_with(files)
            try:
                return await sandbox.read_files(), await sandbox.run(
                    f"command -v {' && command -v '.join(self.programs)}"
                )
            finally:
                await sandbox.close()

        kind = f"environment.sandbox.kind is {self.sandbox.kind}"
        try:
            with ThreadPoolExecutor(1) as thread:  # the caller may run an event loop
                result, programs = thread.submit(asyncio.run, probe()).result()
        except (InfraError, FilesRefused) as error:
            raise ConfigError(f"{kind}: no sandbox works here: {error}") from error
        if programs.status:
            raise ConfigError(f"{kind}: {self.name} needs {', '.join(self.programs)} there, of which one is missing.")
        if result != files:
            raise ConfigError(
                f"{kind}: files that are written into a sandbox are not found in it again. Its user must be able to "
                "write to the working directory."
            )


def shown(result: CommandResult) -> str:
    """A command's end as the policy sees it."""
    lines = [result.output.rstrip("\n")] if result.output.strip() else []
    if result.timed_out:
        lines.append("killed: it reached its time limit")
    elif result.truncated:
        lines.append("killed: it reached its output limit")
    elif result.status or not lines:
        lines.append(f"exit status {result.status}")
    return "\n".join(lines)
