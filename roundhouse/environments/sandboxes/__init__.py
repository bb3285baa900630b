"""Sandboxes: a working directory in which a policy runs commands, and nothing else of the machine.

Invariants
- A sandbox belongs to one rollout. It is released by `close`, and by its own time limit where nobody is left to close it.
- What a command does is its own doing: a time limit, an output limit, a full disk or no more processes are parts of its
  `CommandResult`, which the policy sees. Only a sandbox that cannot start, or is lost, is a failure of the infrastructure
  (`SandboxUnavailable`, `SandboxKilled`, `SandboxOverloaded`): the rollout has no reward and is retried.
- A command has no network, unless the configuration of a container says so, and writes nothing outside of the sandbox.

    sandbox = new_sandbox(LocalSandbox())
    await sandbox.start()
    await sandbox.write_files({"notes/a.txt": b"one\\ntwo\\n"})
    await sandbox.run("wc -l notes/*")          ->   CommandResult(status=0, output="2 notes/a.txt\\n")
    await sandbox.close()

A kind is a section in `roundhouse.config.sandboxes`, a class here, and a line in `KINDS`; one's own is `module:Class`. A kind
inherits `ExecutedSandbox` and has three methods: `start`, `execute`, `close`.
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

from roundhouse.config.sandboxes import (
    ContainerSandbox,
    CustomSandbox,
    KubernetesSandbox,
    LocalSandbox,
    SandboxConfig,
    SandboxSection,
)
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
"""Of every command, next to PATH: none of it is the machine's."""
COMMAND = 'timeout -s KILL "$0" "$@" 2>&1; status=$?; kill -9 -1 2>/dev/null; exit "$status"'
"""A script that runs a program for a time, and then ends all that it started: where there is nothing else of the same user."""
KILLED = (124, 137)
"""Exit statuses of `timeout` at its limit."""
TREE_BYTES = 4 * 2**20
"""Most bytes of `read_files`, as an archive."""
FILE_TIME = 1_700_000_000
"""Of written files and the directories of the first ones, so that a listing looks the same in every rollout."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    status: int
    """Exit status; where a signal ended the command, 128 and its number, or its negative number."""
    output: str
    """What it wrote to stdout and stderr, as far as the limit allows."""
    timed_out: bool = False
    """It was killed at its time limit."""
    truncated: bool = False
    """It wrote more than its limit, and was killed."""


@dataclass(frozen=True, slots=True)
class Execution:
    """As `CommandResult`, in bytes."""

    status: int
    output: bytes
    timed_out: bool = False
    truncated: bool = False


class FilesRefused(Exception):
    """Files cannot be written or read as asked, by the sandbox's doing; the text is for the policy."""


@runtime_checkable
class Sandbox(Protocol):
    """What environments need of a sandbox."""

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

    async def read_files(self) -> dict[str, bytes]:
        """All regular files of the working directory by path.

        Raises:
            FilesRefused: they are too large.
        """

    async def close(self) -> None:
        """End every process of the sandbox and release what it holds. May be called twice, and without a start."""


class ExecutedSandbox(ABC):
    """A sandbox whose files are reached by programs that run in it: `sh` and `tar`. One program runs at a time."""

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
            return CommandResult(2, "sh: a command has no NUL characters\n")
        found = await self._one(["sh", "-c", command], b"", self.limits.output_bytes)
        text = found.output.decode(errors="replace")
        return CommandResult(found.status, text, found.timed_out, found.truncated)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise FilesRefused(f"{name!r} is no path in the working directory")
        made, self._empty = archive(files, directories=self._empty), False
        found = await self._one(["tar", "-xf", "-"], made, self.limits.output_bytes)
        if found.status or found.timed_out:
            raise FilesRefused(found.output.decode(errors="replace").strip() or "the files cannot be written")

    async def read_files(self) -> dict[str, bytes]:
        found = await self._one(["sh", "-c", "exec tar -cf - . 2>/dev/null"], b"", TREE_BYTES)
        if found.truncated or found.timed_out:
            raise FilesRefused(f"the files of the working directory have more than {TREE_BYTES} bytes")
        return regular_files(found.output)

    async def _one(self, arguments: Sequence[str], stdin: bytes, output_bytes: int) -> Execution:
        async with self._running:
            return await self.execute(arguments, stdin, output_bytes)


def archive(files: Mapping[str, bytes], *, directories: bool = False) -> bytes:
    """The files as a tar archive.

    Args:
        directories: it holds theirs, too, after them, so that these have `FILE_TIME` as well. Those that a sandbox has already
            would be given another mode.
    """
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(content), FILE_TIME, 0o644
            tar.addfile(member, io.BytesIO(content))
        parents = {str(path) for name in files for path in PurePosixPath(name).parents} - {"."}
        for name in sorted(parents, reverse=True) if directories else ():
            member = tarfile.TarInfo(name)
            member.type, member.mtime, member.mode = tarfile.DIRTYPE, FILE_TIME, 0o755
            tar.addfile(member)
    return made.getvalue()


def regular_files(content: bytes) -> dict[str, bytes]:
    """The regular files of an archive that a sandbox wrote, which may be anything."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                if member.isreg() and (found := tar.extractfile(member)) is not None:
                    files[str(PurePosixPath(member.name))] = found.read()
    except (tarfile.TarError, ValueError, EOFError):
        return {}
    return files


KINDS: dict[type[SandboxSection], str] = {
    LocalSandbox: "local:LocalProcess",
    ContainerSandbox: "container:Container",
    KubernetesSandbox: "kubernetes:ClaimedPod",
}
"""From a kind's configuration to its class in this package, whose argument it is."""


def new_sandbox(config: SandboxConfig) -> Sandbox:
    """A sandbox that has not started.

    Raises:
        ConfigError: its class cannot be imported or made.
    """
    key = "environment.sandbox"
    if isinstance(config, CustomSandbox):
        own: Any = load_class(config.target, Sandbox, f"{key}.target")
        try:
            made: Sandbox = own(config, **resolved(config.parameters))
        except TypeError as error:
            raise ConfigError(
                f"{key}.parameters {config.parameters!r} do not fit {config.target}: {error}. They are the keyword arguments "
                "of the class, after its section."
            ) from error
        return made
    kind: Any = load_class(f"{__name__}.{KINDS[type(config)]}", Sandbox, f"{key}.kind")
    return kind(config)
