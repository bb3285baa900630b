"""A sandbox that is a container of Docker or Podman.

Invariants
- The container runs without capabilities, gains no privilege, is not root, and cannot use a network unless `network`
  permits it. Its working directory and /tmp are in memory and count as its memory.
- When a command ends, all its processes are killed, as in a local sandbox.
- A container ends by itself: its first process counts down the lifetime, and `--rm` removes it. The first sandbox of
  each later process removes those with a dead owner or an expired deadline.

A failure of the command line program (the daemon is down, the container is gone) is the infrastructure's, never the
policy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence

import psutil

from roundhouse.environments.sandbox import SandboxKilled, SandboxOverloaded, SandboxUnavailable
from roundhouse.environments.sandboxes import COMMAND, KILLED, VARIABLES, WORK, ExecutedSandbox, Execution
from roundhouse.plugins.container_sandbox.section import ContainerSandbox

PROGRAMS = ("docker", "podman")
"""In the order in which they are tried."""
OWNER, DEADLINE = "roundhouse.owner", "roundhouse.deadline"
"""Labels: `host/process id/its start`, and seconds since 1970."""
GRACE_SECONDS = 60.0
"""Time for the program and its daemon in addition to the command's."""
COUNT_DOWN = (
    'end=$(($(date +%s) + $0)); while [ "$(date +%s)" -lt "$end" ]; do sleep "$((end - $(date +%s)))" & wait; done'
)
"""The first process: it collects ended processes, and continues when the end of a command kills its `sleep`."""


class Container(ExecutedSandbox):
    """See the module."""

    def __init__(self, config: ContainerSandbox) -> None:
        super().__init__(config)
        self._config = config
        self._name = f"roundhouse-{uuid.uuid4().hex}"
        self._program = ""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._program = await loop.run_in_executor(None, find_program, self._config.program)
        await loop.run_in_executor(None, remove_abandoned, self._program)
        status, _, errors = await self._call(run_arguments(self._config, self._name, owner(), time.time()))
        if status:
            raise SandboxUnavailable(
                f"{self._program} cannot start a container of environment.sandbox.image {self._config.image}: {errors} "
                f"Images are never pulled by a rollout: do `{self._program} pull {self._config.image}` on each machine that "
                "collects."
            )

    async def execute(self, arguments: Sequence[str], stdin: bytes, output_bytes: int) -> Execution:
        seconds = self.limits.command_seconds
        call = ["exec", "--interactive", self._name, "sh", "-c", COMMAND, f"{seconds:g}", *arguments]
        start = time.monotonic()
        status, output, errors = await self._call(call, stdin, output_bytes + 1)
        elapsed = time.monotonic() - start
        truncated = len(output) > output_bytes
        if truncated:
            await self._call(["exec", self._name, "sh", "-c", "kill -9 -1"])
        elif status and (status == 125 or not await self._is_running()):
            raise SandboxKilled(
                f"The container of a sandbox has ended, or {self._program} failed: {errors or 'no message'} Its lifetime "
                f"(environment.sandbox.lifetime_seconds) is {self.limits.lifetime_seconds:g} s."
            )
        return Execution(
            status, output[:output_bytes], not truncated and status in KILLED and elapsed >= seconds, truncated
        )

    async def close(self) -> None:
        if self._program:
            await self._call(["kill", self._name])
            await self._call(
                ["rm", "--force", self._name]
            )  # alone, Podman's would ask it to stop and wait for ten seconds
            self._program = ""

    async def _is_running(self) -> bool:
        _, output, _ = await self._call(["inspect", "--format", "{{.State.Running}}", self._name])
        return output.strip() == b"true"

    async def _call(
        self, arguments: Sequence[str], stdin: bytes = b"", output_bytes: int = 2**20
    ) -> tuple[int, bytes, str]:
        """Status, output up to a limit at which the program is killed, and errors of a call of the program."""
        try:
            process = await asyncio.create_subprocess_exec(
                self._program,
                *arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise SandboxUnavailable(f"{self._program} cannot be started: {error}.") from error
        try:
            async with asyncio.timeout(self.limits.command_seconds + GRACE_SECONDS):
                output, errors = await _exchange(process, stdin, output_bytes)
                return await process.wait(), output, errors.decode(errors="replace").strip()
        except TimeoutError as error:
            raise SandboxOverloaded(
                f"{self._program} {arguments[0]} did not end within {self.limits.command_seconds + GRACE_SECONDS:g} s: lower "
                "rollout.concurrency, or check its daemon."
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _exchange(process: asyncio.subprocess.Process, stdin: bytes, output_bytes: int) -> tuple[bytes, bytes]:
    """Write all of stdin while reading; a process that writes more than its limit is killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    writing, errors = (
        asyncio.create_task(_feed(process.stdin, stdin)),
        asyncio.create_task(process.stderr.read(2**16)),
    )
    output = bytearray()
    while len(output) < output_bytes and (more := await process.stdout.read(output_bytes - len(output))):
        output += more
    if len(output) == output_bytes:
        process.kill()
    await writing
    return bytes(output), await errors


async def _feed(pipe: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(content)
        await pipe.drain()
    pipe.close()


def run_arguments(config: ContainerSandbox, name: str, owner: str, now: float) -> list[str]:
    """Arguments that start the container."""
    memory = f"{config.memory_mib}m"
    options = {
        "--name": name,
        "--network": config.network,
        "--memory": memory,
        "--memory-swap": memory,
        "--cpus": f"{config.cpus:g}",
        "--pids-limit": str(config.processes),
        "--user": f"{config.user}:{config.user}",
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--workdir": WORK,
        "--pull": "never",
        "--entrypoint": "sh",
    } | ({"--runtime": config.runtime} if config.runtime is not None else {})
    arguments = ["run", "--detach", "--rm", *(["--read-only"] if config.read_only else [])]
    arguments += [part for option in options.items() for part in option]
    for label, value in ((OWNER, owner), (DEADLINE, str(int(now + config.lifetime_seconds)))):
        arguments += ["--label", f"{label}={value}"]
    for directory in (WORK, "/tmp", *config.directories):
        arguments += ["--tmpfs", f"{directory}:rw,exec,nosuid,nodev,size={config.disk_mib}m,mode=1777"]
    for variable, value in VARIABLES.items():
        arguments += ["--env", f"{variable}={value}"]
    return [*arguments, config.image, "-c", COUNT_DOWN, str(int(config.lifetime_seconds))]


@functools.cache
def find_program(named: str | None) -> str:
    """The program that is named, else the first of PROGRAMS, that answers here.

    Raises:
        SandboxUnavailable: none does.
    """
    problems = []
    for program in PROGRAMS if named is None else (named,):
        if shutil.which(program) is None:
            problems.append(f"{program} is not installed")
            continue
        probe = subprocess.run([program, "info"], capture_output=True, text=True, timeout=GRACE_SECONDS)
        if not probe.returncode:
            return program
        problems.append(f"{program} does not work: {(probe.stderr.strip().splitlines() or ['no message'])[-1]}")
    raise SandboxUnavailable(
        f"environment.sandbox.kind is container, but {'; '.join(problems)}. Install Docker or Podman for the user of the "
        "collector, or set environment.sandbox.kind to local or kubernetes."
    )


def owner() -> str:
    """This process, by a name that no later one has."""
    return f"{socket.gethostname()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def is_abandoned(label: str, deadline: str, now: float) -> bool:
    """Return whether nobody will close the container of these labels: its owner on this machine is gone, or its time
    is over."""
    host, pid, started = label.split("/")
    if host == socket.gethostname():
        try:
            return f"{psutil.Process(int(pid)).create_time():.2f}" != started
        except psutil.NoSuchProcess:
            return True
    return now > int(deadline) + GRACE_SECONDS


@functools.cache
def remove_abandoned(program: str) -> None:
    """Remove containers that are abandoned; once in a process."""
    listed = _output(program, "ps", "--all", "--quiet", "--filter", f"label={OWNER}").split()
    form = f'{{{{.Id}}}} {{{{index .Config.Labels "{OWNER}"}}}} {{{{index .Config.Labels "{DEADLINE}"}}}}'
    lines = _output(program, "inspect", "--format", form, *listed).splitlines() if listed else []
    for identity, label, deadline in (line.split() for line in lines):
        if is_abandoned(label, deadline, time.time()):
            _output(program, "kill", identity)
            _output(program, "rm", "--force", identity)


def _output(*command: str) -> str:
    """Return its output. The status of a list is ignored, because listed containers may vanish."""
    return subprocess.run(command, capture_output=True, text=True, timeout=GRACE_SECONDS).stdout
