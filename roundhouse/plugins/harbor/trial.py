"""The session of a rollout: the steps of a task in the sandbox of the policy, each judged by its tests.

Invariant: the numbers equal the ones of Harbor's verifier after the same commands. Tests enter a sandbox after the policy's
last turn of their step and leave it before the next one. A separate verifier gets the regular files of the artifacts alone.

    /app (WORKDIR)              files of environment/, then of steps/NAME/workdir; commands begin here, until the time is over
    /tests                      empty while the policy works
    /logs/verifier              reward.txt or reward.json, written by /tests/test.sh within [verifier] timeout_sec
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import posixpath
import tarfile
import time
from collections.abc import Callable, Mapping
from shlex import quote

from roundhouse.environments.base import BadReward
from roundhouse.environments.sandboxes import FILE_TIME, CommandResult, FilesRefused, Sandbox
from roundhouse.plugins.harbor.dockerfile import Files
from roundhouse.plugins.harbor.task_file import Artifact
from roundhouse.plugins.harbor.tasks import TEST, HarborStep, HarborTask, Place
from roundhouse.rollout.protocol import SeedFailed, VerifierFailed

KILLED = (124, 137, -9)
"""Statuses of `timeout -s KILL` at its limit."""
UPLOAD = ".upload.tar"
PACKED = "/tmp/.artifacts"
SHELL = "$(command -v bash || echo sh)"
LOGS = "mkdir -p /logs/verifier /logs/agent /logs/artifacts"
EMPTY = f"rm -rf /tests/* /tests/.[!.]* /logs/verifier; {LOGS}"
READ_REWARD = """cd /logs/verifier && for name in reward.json reward.txt; do
    if [ -e $name ]; then echo $name; cat $name; exit; fi
done"""
Artifacts = dict[str, tuple[list[str], Files]]
"""Directories, and files by absolute path, of each artifact by its path."""


class PlacedSandbox:
    """A sandbox with the files and variables of a place."""

    def __init__(self, sandbox: Sandbox, place: Place, name: str) -> None:
        self.sandbox, self.place, self._name = sandbox, place, name

    async def start(self) -> None:
        """Begin with the files of the place.

        Raises:
            SeedFailed: a directory cannot be written, or the files do not fit.
        """
        await self.sandbox.start()
        await self.seed(self.place.files)
        written = (*(() if self.place.has_tests else (self.place.workdir,)), *self.place.directories)
        names = " ".join(map(quote, written))
        dates = f"find {names} -type d -exec touch -d @{FILE_TIME} {{}} + 2>/dev/null"
        tests = " && ".join(f"[ -w {quote(path)} ]" for path in written)
        result = await self.sandbox.run(f"{LOGS} {names}; {'true' if self.place.image else dates}; {tests}")
        if result.status:
            raise SeedFailed(
                f"{self._name}: the sandbox cannot write to all of {names}. Add `RUN mkdir -p {names} && chmod -R a+rwX "
                f"{names}` to the image and set environment.sandbox.read_only to false, or mount volumes there. "
                f"{result.output[:300]}"
            )

    async def read_files(self, directory: str = ".") -> dict[str, bytes]:
        return await self.sandbox.read_files(directory)

    async def close(self) -> None:
        await self.sandbox.close()

    async def seed(self, files: Files) -> None:
        """Write files before the policy's turn.

        Raises:
            SeedFailed: they cannot be written.
        """
        try:
            await self.copy(files)
        except FilesRefused as error:
            raise SeedFailed(f"The files of {self._name} cannot be written into the sandbox: {error}") from error

    async def shell(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> CommandResult:
        """Run a command in the working directory with the variables of the place."""
        exports = "".join(
            f"export {name}={quote(value)}; " for name, value in {**self.place.env, **(variables or {})}.items()
        )
        start = time.monotonic()
        line = (
            f"{exports}cd {quote(self.place.workdir)} && exec timeout -s KILL {seconds:.3f} {SHELL} -c {quote(command)}"
        )
        result = await self.sandbox.run(line)
        is_over = result.status in KILLED and time.monotonic() - start >= seconds
        return dataclasses.replace(result, timed_out=True) if is_over else result

    async def copy(self, files: Files, directories: list[str] | None = None) -> None:
        """Write files, and make directories, by absolute path.

        Raises:
            FilesRefused: they cannot be written.
        """
        if not files and not directories:
            return
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path in directories or ():
                member = tarfile.TarInfo(path.lstrip("/"))
                member.type, member.mtime, member.mode = tarfile.DIRTYPE, FILE_TIME, 0o755
                tar.addfile(member)
            for path, (content, is_program) in files.items():
                member = tarfile.TarInfo(path.lstrip("/"))
                member.size, member.mtime, member.mode = len(content), FILE_TIME, 0o755 if is_program else 0o644
                tar.addfile(member, io.BytesIO(content))
        await self.sandbox.write_files({UPLOAD: buffer.getvalue()})
        result = await self.sandbox.run(f"tar -xf {UPLOAD} -C /; status=$?; rm -f {UPLOAD}; exit $status")
        if result.status:
            raise FilesRefused(result.output.strip()[:500] or "tar failed")

    async def artifacts(self, artifacts: list[Artifact]) -> Artifacts:
        """Return the existing artifacts.

        Raises:
            FilesRefused: they are too large.
        """
        lines = [f"rm -rf {PACKED}; mkdir {PACKED}"]
        for number, each in enumerate(artifacts):
            path, exclude = quote(each.path), " ".join(f"--exclude={quote(pattern)}" for pattern in each.exclude)
            folder, name = map(quote, posixpath.split(each.path))
            lines.append(f"if [ -d {path} ]; then tar -cf {PACKED}/{number} {exclude} -C {path} .")
            lines.append(f"elif [ -f {path} ]; then tar -cf {PACKED}/{number} -C {folder} -- {name}; fi")
        await self.sandbox.run("\n".join(lines))
        archives = await self.sandbox.read_files(PACKED)
        await self.sandbox.run(f"rm -rf {PACKED}")
        return {
            each.path: unpacked(archives[str(number)], each.path)
            for number, each in enumerate(artifacts)
            if str(number) in archives
        }

    async def receive(self, artifacts: Artifacts) -> None:
        """Write the artifacts, each in the place of the file or directory of its path.

        Raises:
            FilesRefused: they cannot be written.
        """
        for path, (directories, files) in artifacts.items():
            await self.sandbox.run(f"rm -rf {quote(path)}")
            await self.copy(files, directories)

    async def rewards(self, step: HarborStep) -> dict[str, float]:
        """Run the tests and return the numbers of their reward.

        Raises:
            VerifierFailed: the tests do not end, or leave no reward.
            BadReward: it is not a finite number.
            FilesRefused: the tests cannot be written.
        """
        await self.sandbox.run("rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json")
        await self.copy({} if self.place.has_tests else step.tests)
        command = f"chmod +x {TEST}; ({TEST}) > /logs/verifier/test-stdout.txt 2>&1"
        seconds = step.table.verifier.timeout_sec
        if (await self.shell(command, seconds, step.test_env)).timed_out:
            raise VerifierFailed(f"{self._name}: the tests did not end within [verifier] timeout_sec = {seconds:g} s.")
        return read_rewards(self._name, await self.sandbox.run(READ_REWARD))


class Trial(PlacedSandbox):
    """The sandbox of the policy, in which the steps of a task follow each other."""

    def __init__(self, task: HarborTask, new: Callable[[Place], Sandbox], command_seconds: float) -> None:
        super().__init__(new(task.place), task.place, task.name)
        self._steps, self._new = task.steps, new
        self._command_seconds = command_seconds
        self._end, self._is_over = math.inf, False
        self.results: list[dict[str, float]] = []
        """Numbers of each step so far."""

    @property
    def _step(self) -> HarborStep:
        return self._steps[len(self.results)]

    async def start(self) -> None:
        """Begin the first step.

        Raises:
            SeedFailed: as `PlacedSandbox.start`; or its setup.sh fails.
        """
        await super().start()
        await self._begin()

    async def run(self, command: str) -> CommandResult:
        left = self._end - time.monotonic()
        if left <= 0:
            return CommandResult(1, f"{self._over()}\n")
        return await self.shell(command, min(self._command_seconds, left))

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        if time.monotonic() >= self._end:
            raise FilesRefused(self._over())
        for name in files:
            if not name or "\0" in name or name.endswith("/"):
                raise FilesRefused(f"{name!r} is not the path of a file")
        paths = {posixpath.normpath(posixpath.join(self.place.workdir, name)): files[name] for name in files}
        await self.copy({path: (content, False) for path, content in paths.items()})

    async def advance(self) -> str | None:
        """Judge the step, begin the next one and return its instruction. Return None after the last one, or if a number is
        below its threshold.

        Raises:
            SeedFailed: as `start`, of the next step or of the sandbox of a verifier.
            VerifierFailed, BadReward: as `PlacedSandbox.rewards`.
        """
        if self._is_over:
            return None
        step = self._step
        try:
            rewards = await self._judge(step)
        except FilesRefused as error:
            raise VerifierFailed(f"{self._name}: the tests or artifacts cannot be copied: {error}") from error
        self.results.append(rewards)
        is_low = any(rewards.get(name, -math.inf) < least for name, least in step.table.min_reward.items())
        self._is_over = is_low or len(self.results) == len(self._steps)
        if self._is_over:
            return None
        if step.verifier is None:
            await self.sandbox.run(EMPTY)
        await self._begin()
        return self._step.instruction

    async def _begin(self) -> None:
        step, setup = self._step, posixpath.join(self.place.workdir, "setup.sh")
        await self.seed(step.files)
        if setup in step.files:
            result = await self.shell(f"bash {quote(setup)}", step.table.verifier.timeout_sec)
            if result.status:
                raise SeedFailed(
                    f"{self._name}: setup.sh of step {step.table.name} ended with {result.status}. {result.output[:300]}"
                )
        self._end = math.inf if step.seconds is None else time.monotonic() + step.seconds

    async def _judge(self, step: HarborStep) -> dict[str, float]:
        for hook in step.hooks:
            await self.shell(hook.command, hook.timeout_sec)
        if step.verifier is None:
            await self.sandbox.run(EMPTY)
            return await self.rewards(step)
        verifier = PlacedSandbox(self._new(step.verifier), step.verifier, self._name)
        try:
            await verifier.start()
            await verifier.receive(await self.artifacts(step.artifacts))
            return await verifier.rewards(step)
        finally:
            await verifier.close()

    def _over(self) -> str:
        return f"the time limit of the task ([agent] timeout_sec = {self._step.seconds:g} s) is over"


def unpacked(content: bytes, path: str) -> tuple[list[str], Files]:
    """Return directories and regular files of an archive that a sandbox made of an artifact, without links, such as one to the
    tests.

    Raises:
        FilesRefused: it is not a whole archive.
    """
    directories: list[str] = []
    files: Files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = tar.getmembers()
            base = path if members and members[0].isdir() else posixpath.dirname(path)
            for member in members:
                name = posixpath.normpath(posixpath.join(base, member.name))
                if not f"{name}/".startswith(f"{path}/"):
                    continue
                if member.isdir():
                    directories.append(name)
                elif member.isreg() and (stream := tar.extractfile(member)) is not None:
                    files[name] = stream.read(), bool(member.mode & 0o100)
                elif member.islnk() and (other := posixpath.normpath(posixpath.join(base, member.linkname))) in files:
                    files[name] = files[other]
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise FilesRefused(f"the archive of {path} cannot be read: {error}") from error
    return directories, files


def read_rewards(task: str, result: CommandResult) -> dict[str, float]:
    """Return the numbers of a reward file: its name and its content, as `READ_REWARD` prints them.

    Raises:
        VerifierFailed: the file is missing, or has something else than numbers.
        BadReward: a number is not finite.
    """
    file, _, content = result.output.partition("\n")
    if not file:
        raise VerifierFailed(f"{task}: tests/test.sh wrote neither /logs/verifier/reward.json nor reward.txt.")
    try:
        if result.truncated or not content.strip():
            raise ValueError("it is empty or larger than environment.sandbox.output_bytes")
        values = {"reward": float(content)} if file == "reward.txt" else json.loads(content)
        if not isinstance(values, dict) or not all(isinstance(value, int | float) for value in values.values()):
            raise ValueError("it is not an object of numbers")
    except (ValueError, RecursionError) as error:
        raise VerifierFailed(f"{task}: {file} cannot be read: {error!s:.200}. Its text: {content!r:.200}") from error
    try:
        rewards = {name: float(value) for name, value in values.items()}
    except OverflowError:
        rewards = {"reward": math.inf}
    if not all(map(math.isfinite, rewards.values())):
        raise BadReward(f"{task}: {file} has a number that is not finite: {content!r:.200}")
    return rewards


def composed(rewards: list[dict[str, float]], strategy: str | None) -> dict[str, float]:
    """Return the numbers of a trial: those of its last step (`final`), or the mean over its steps, in which a missing number
    is 0."""
    if strategy == "final":
        return rewards[-1]
    names = dict.fromkeys(name for each in rewards for name in each)
    return {name: sum(each.get(name, 0.0) for each in rewards) / len(rewards) for name in names}
