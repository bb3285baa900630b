"""Sandboxes: a working directory in which a policy runs commands, isolated from the machine.

Invariants
- A sandbox belongs to one rollout. `close` releases it, or its own time limit if nobody closes it.
- Effects of a command belong to the command: a time limit, an output limit, a full disk or too many processes are parts
  of its
  `CommandResult`, which the policy sees. Only a sandbox that cannot start, or is lost, is an infrastructure failure
  (`SandboxUnavailable`, `SandboxKilled`, `SandboxOverloaded`): the rollout does not get a reward and is retried.
- A command cannot use the network, unless a container's configuration permits it, and writes only inside the sandbox.

    sandbox = new_sandbox(LocalSandbox())
    await sandbox.start()
    await sandbox.write_files({"notes/a.txt": b"one\\ntwo\\n"})
    await sandbox.run("wc -l notes/*")          ->   CommandResult(status=0, output="2 notes/a.txt\\n")
    await sandbox.close()

A kind is a plug-in of role `sandbox`: a section, and a class that is made with it; a custom one is `module:Class`. A
kind inherits `ExecutedSandbox` and has three methods: `start`, `execute`, `close`.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol, runtime_checkable

from roundhouse import plugins
from roundhouse.config.sandboxes import CustomSandbox, SandboxConfig, SandboxSection
from roundhouse.config.secrets import resolved
from roundhouse.errors import ConfigError
from roundhouse.imports import load_class

WORK = "/sandbox"
"""The working directory of every command."""
VARIABLES = {
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
"""Environment variables of every command, in addition to PATH; none comes from the machine."""
COMMAND = 'timeout -s KILL "$0" "$@" 2>&1; status=$?; kill -9 -1 2>/dev/null; exit "$status"'
"""A script that runs a program for a time, and then ends all its processes; for sandboxes without other processes of
the user."""
KILLED = (124, 137)
"""Exit statuses of `timeout` at its limit."""
TREE_BYTES = 4 * 2**20
"""Most bytes of `read_files`, as an archive."""
FILE_TIME = 1_700_000_000
"""Modification time of written files and the first ones' directories, so that a listing is equal in every rollout."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command."""

    status: int
    """Exit status; after a signal, 128 plus its number, or its negative number."""
    output: str
    """Its stdout and stderr, up to the limit."""
    timed_out: bool = False
    """It was killed at its time limit."""
    truncated: bool = False
    """It wrote more than its limit, and was killed."""


@dataclass(frozen=True, slots=True)
class Execution:
    """`CommandResult` in bytes."""

    status: int
    output: bytes
    timed_out: bool = False
    truncated: bool = False


class FilesRefused(Exception):
    """Files cannot be written or read as asked, by the sandbox's doing; the text is for the policy."""


@runtime_checkable
class Sandbox(Protocol):
    """The sandbox interface for environments."""

    async def start(self) -> None:
        """Begin; the working directory is empty.

        Raises:
            InfraError: not now.
            ConfigError: never, as it is configured.
        """

    async def run(self, command: str) -> CommandResult:
        """Run a line of `sh` in the working directory, within the limits of the configuration."""

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files by their paths in the working directory.

        Raises:
            FilesRefused
        """

    async def read_files(self, directory: str = ".") -> dict[str, bytes]:
        """All regular files of a directory, by default the working directory, by path.

        Raises:
            FilesRefused: they are too large.
        """

    async def close(self) -> None:
        """End every process of the sandbox and release its resources. May be called twice, and without a start."""


class ExecutedSandbox(ABC):
    """A sandbox that accesses its files by programs that run in it: `sh` and `tar`. One program runs at a time."""

    def __init__(self, limits: SandboxSection) -> None:
        self.limits = limits
        self._running = asyncio.Lock()
        self._empty = True

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def execute(self, arguments: Sequence[str], stdin: bytes, output_bytes: int) -> Execution:
        """Run a program in the working directory, for `limits.command_seconds` at most."""

    @abstractmethod
    async def close(self) -> None: ...

    async def run(self, command: str) -> CommandResult:
        if "\0" in command:
            return CommandResult(2, "sh: a command cannot contain NUL characters\n")
        execution = await self._one(["sh", "-c", command], b"", self.limits.output_bytes)
        text = execution.output.decode(errors="replace")
        return CommandResult(execution.status, text, execution.timed_out, execution.truncated)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise FilesRefused(f"{name!r} is not a path in the working directory")
        content, self._empty = archive(files, directories=self._empty), False
        execution = await self._one(["tar", "-xf", "-"], content, self.limits.output_bytes)
        if execution.status or execution.timed_out:
            raise FilesRefused(execution.output.decode(errors="replace").strip() or "the files cannot be written")

    async def read_files(self, directory: str = ".") -> dict[str, bytes]:
        script = 'exec tar -cf - -C "$0" . 2>/dev/null'
        execution = await self._one(["sh", "-c", script, directory], b"", TREE_BYTES)
        if execution.truncated or execution.timed_out:
            place = "the working directory" if directory == "." else directory
            raise FilesRefused(f"the files of {place} have more than {TREE_BYTES} bytes")
        return regular_files(execution.output)

    async def _one(self, arguments: Sequence[str], stdin: bytes, output_bytes: int) -> Execution:
        async with self._running:
            return await self.execute(arguments, stdin, output_bytes)


def archive(files: Mapping[str, bytes], *, directories: bool = False) -> bytes:
    """Return the files as a tar archive.

    Args:
        directories: also add their directories, after them, so that these have `FILE_TIME` as well. Existing
            directories of a sandbox would get another mode.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(content), FILE_TIME, 0o644
            tar.addfile(member, io.BytesIO(content))
        parents = {str(path) for name in files for path in PurePosixPath(name).parents} - {"."}
        for name in sorted(parents, reverse=True) if directories else ():
            member = tarfile.TarInfo(name)
            member.type, member.mtime, member.mode = tarfile.DIRTYPE, FILE_TIME, 0o755
            tar.addfile(member)
    return buffer.getvalue()


def regular_files(content: bytes) -> dict[str, bytes]:
    """The regular files of an archive that a sandbox wrote, which may be anything."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                if member.isreg() and (stream := tar.extractfile(member)) is not None:
                    files[str(PurePosixPath(member.name))] = stream.read()
    except (tarfile.TarError, ValueError, EOFError):
        return {}
    return files


def new_sandbox(config: SandboxConfig) -> Sandbox:
    """A sandbox that has not started.

    Raises:
        ConfigError: its class cannot be imported or made.
    """
    sandbox = plugins.factory("sandbox", config.kind)(config)
    if isinstance(sandbox, Sandbox):
        return sandbox
    raise ConfigError(
        f"environment.sandbox.kind is {config.kind}, but its plug-in returns a {type(sandbox).__name__} without the methods of "
        "roundhouse.environments.sandboxes.Sandbox. Correct the plug-in."
    )


def load_custom(config: CustomSandbox) -> Sandbox:
    """Make a sandbox of a user's own class.

    Raises:
        ConfigError: it cannot be imported or made.
    """
    own: Any = load_class(config.target, Sandbox, "environment.sandbox.target")
    try:
        sandbox: Sandbox = own(config, **resolved(config.parameters))
    except TypeError as error:
        raise ConfigError(
            f"environment.sandbox.parameters {config.parameters!r} do not fit {config.target}: {error}. They are the keyword "
            "arguments of the class, after its section."
        ) from error
    return sandbox
