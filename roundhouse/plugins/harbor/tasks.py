"""Task directories of Harbor, read as data of strangers.

Invariant: no file outside of a task directory is read, and nothing of it runs here. A missing file is refused, as in Harbor. So
is a task with a feature of Harbor that is missing here: it is never played without the feature.
"""

from __future__ import annotations

import glob
import hashlib
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from roundhouse.config.sandboxes import Directory
from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.harbor.dockerfile import Files, copied_files, read_dockerfile
from roundhouse.plugins.harbor.task_file import (
    Artifact,
    EnvironmentTable,
    Hook,
    Step,
    TaskToml,
    missing_features,
    read_toml,
)
from roundhouse.text_files import decode_text

MOST_FILES, MOST_BYTES = 2000, 16 * 2**20
"""Of the files of one task that are read."""
CANARY = re.compile(
    r"\A(?:[^\S\n]*(?:<!--.*canary.*-->|#.*canary.*)[^\S\n]*(?:\n|\Z))*(?:[^\S\n]*(?:\n|\Z))*", re.IGNORECASE
)
"""Leading lines against contamination and the blank lines after them, which Harbor removes."""
NAME = re.compile(r"[A-Za-z0-9_][\w .+-]{0,99}(/[A-Za-z0-9_][\w.+-]{0,99})?", re.ASCII)
SHEBANG = re.compile(r"#!.*\b(ba)?sh\b")
DIRECTORIES = TypeAdapter(Annotated[list[Directory], Field(max_length=12)])
TEST = "/tests/test.sh"
OWN = "/tests", "/logs", "/tmp"
"""Directories that a sandbox has in any case."""


@dataclass(frozen=True, slots=True)
class Place:
    """A sandbox of the policy, or of a separate verifier."""

    workdir: str
    image: str
    """Reason for which it needs an image; empty if `files` are enough."""
    image_name: str
    """`{task}` in the name of its image."""
    docker_image: str
    directories: tuple[str, ...]
    """Writable directories that it has to have."""
    files: Files = field(repr=False)
    """Files to copy at the start, by absolute path."""
    env: dict[str, str]
    has_tests: bool = False
    """Its image or files have the tests."""


@dataclass(frozen=True, slots=True)
class HarborStep:
    """One step, or the whole of a task without steps."""

    table: Step
    instruction: str
    seconds: float | None
    """Time limit of the policy."""
    files: Files = field(repr=False)
    """Files to copy at its beginning, by absolute path; `setup.sh` of the working directory is then run."""
    tests: Files = field(repr=False)
    test_env: dict[str, str]
    verifier: Place | None
    """None: the tests run in the sandbox of the policy."""
    artifacts: list[Artifact]
    """Files that a separate verifier receives."""
    hooks: list[Hook]
    solution: str | None = field(repr=False)
    """The commands of a solution that is one script of a shell, without variables."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task directory."""

    name: str
    directory: Path
    toml: TaskToml
    place: Place
    steps: list[HarborStep]
    digest: str
    """Of all files that are read."""


def find_tasks(pattern: str) -> list[HarborTask]:
    """Read the task directories below a directory, or of a pattern.

    Raises:
        ConfigError: a directory is not a task, or cannot be played here, or two have one name.
    """
    tasks: dict[str, HarborTask] = {}
    for folder in map(Path, sorted(glob.glob(str(Path(pattern).expanduser())))):
        for directory in [folder] if (folder / "task.toml").exists() else _subdirectories(folder):
            task = read_task(directory)
            if task.name in tasks:
                both = f"{tasks[task.name].directory} and {directory}"
                raise ConfigError(f"environment.path: {both} have the name {task.name}. Rename one.")
            tasks[task.name] = task
    if not tasks:
        raise ConfigError(f"environment.path is {pattern}, which has no task directory. Name a directory of tasks.")
    return [*tasks.values()]


def _subdirectories(folder: Path) -> list[Path]:
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    return [each for each in names if each.is_dir() and not each.name.startswith(".")]


def read_task(directory: Path) -> HarborTask:
    """Read and validate one task directory.

    Raises:
        ConfigError: it is not a task, or cannot be played here.
    """
    try:
        return _task(directory)
    except (OSError, ValueError, RuntimeError, DataError) as error:  # RuntimeError: links that form a loop
        raise ConfigError(f"environment.path: {directory} is not a task that can be played: {error}") from error


def _task(directory: Path) -> HarborTask:
    reader = _Reader(directory.resolve(strict=True))
    toml = read_toml(reader.text("task.toml"))
    name = toml.task.name if toml.task is not None else reader.root.name
    if not NAME.fullmatch(name):
        raise ValueError(
            f"its name {name!r:.200} has other characters than letters, digits, space, -, _, . and +. Rename it."
        )
    if features := [*missing_features(toml, reader.root)]:
        raise ValueError(f"it uses {', '.join(features)}, which Roundhouse does not support. Leave the task out.")
    steps = toml.steps or [Step.model_construct(name="", agent=toml.agent, verifier=toml.verifier)]
    separate = [step for step in steps if toml.mode(step) == "separate"]
    artifacts = [each.path for step in separate for each in toml.artifacts_of(step)]
    place = _placed(toml.environment, reader, "environment", name.rpartition("/")[2].lower(), artifacts)
    return HarborTask(
        name=name,
        directory=directory,
        toml=toml,
        place=place,
        steps=[_step(toml, step, reader, place) for step in steps],
        digest=reader.digest.hexdigest(),
    )


def _step(toml: TaskToml, step: Step, reader: _Reader, place: Place) -> HarborStep:
    folder = f"steps/{step.name}/" if step.name else ""
    instruction = CANARY.sub("", reader.text(f"{folder}instruction.md"), count=1)
    if not instruction.strip():
        raise ValueError(f"{folder}instruction.md is empty. Write the task.")
    verifier = _verifier(toml, step, reader, place) if toml.mode(step) == "separate" else None
    tests = reader.tree("tests") | reader.tree(f"{folder}tests")
    if verifier is not None and verifier.has_tests:
        if not verifier.image and TEST not in verifier.files:
            raise ValueError(f"the Dockerfile of its verifier copies no file to {TEST}. Add `COPY . /tests/`.")
    elif "test.sh" not in tests:
        raise ValueError(f"{folder}tests/test.sh is missing. Write the script that judges the task.")
    solution = reader.tree(f"{folder}solution") or reader.tree("solution")
    script = solution["solve.sh"][0].decode(errors="replace") if solution.keys() == {"solve.sh"} else ""
    shebang, _, command = script.partition("\n")
    files = reader.tree(f"{folder}workdir") if folder else {}
    return HarborStep(
        table=step,
        instruction=instruction,
        seconds=step.agent.timeout_sec or toml.agent.timeout_sec,
        files={posixpath.join(place.workdir, path): file for path, file in files.items()},
        tests={f"/tests/{path}": file for path, file in tests.items()},
        test_env=toml.verifier.env | step.verifier.env,
        verifier=verifier,
        artifacts=[] if verifier is None else toml.artifacts_of(step),
        hooks=[*toml.verifier.collect, *(step.verifier.collect if folder else ())],
        solution=command.strip() if SHEBANG.match(shebang) and not toml.solution.env else None,
    )


def _verifier(toml: TaskToml, step: Step, reader: _Reader, place: Place) -> Place:
    """Return the sandbox of a separate verifier: that of the step, of the task, or another one like the policy's."""
    table = step.verifier.environment or toml.verifier.environment or toml.environment
    artifacts = [each.path for each in toml.artifacts_of(step)]
    own = [(toml.verifier.environment, "tests", f"{place.image_name}-verifier")]
    if step.name:
        name = f"{place.image_name}-{step.name.lower()}-verifier"
        own.insert(0, (step.verifier.environment, f"steps/{step.name}/tests", name))
    for environment, folder, name in own:
        docker_image = environment and environment.docker_image
        if docker_image or (reader.root / folder / "Dockerfile").is_file():
            table = table.model_copy(update={"docker_image": docker_image})
            return _placed(table, reader, folder, name, artifacts, has_tests=True)
    table = table.model_copy(update={"docker_image": toml.environment.docker_image})
    return _placed(table, reader, "environment", place.image_name, artifacts)


def _placed(
    table: EnvironmentTable, reader: _Reader, folder: str, name: str, artifacts: list[str], has_tests: bool = False
) -> Place:
    """Return the sandbox of an environment.

    Args:
        folder: has its Dockerfile.
        artifacts: paths that can be written.
        has_tests: whether it is that of a verifier with tests.
    """
    dockerfile = reader.root / folder / "Dockerfile"
    build = read_dockerfile(reader.text(f"{folder}/Dockerfile")) if dockerfile.exists() else None
    if build is None and table.docker_image is None:
        raise ValueError(f"{folder}/Dockerfile is missing. Write it, or set [environment] docker_image.")
    workdir = posixpath.normpath(table.workdir or (build and build.workdir) or ".")
    if not workdir.startswith("/") or "$" in workdir:
        raise ValueError(
            f"the working directory of {folder}/ is not known. Set WORKDIR in its Dockerfile to an absolute path."
        )
    files: Files = {}
    directories = ["/logs"] if has_tests else ["/tests", "/logs"]
    if build is None:  # Harbor copies the files next to a missing Dockerfile, unless they are tests
        image = "docker_image"
        if not has_tests:
            files = {posixpath.join(workdir, path): file for path, file in reader.tree(folder).items()}
    elif table.docker_image or (reader.root / folder / ".dockerignore").exists():
        image = build.image or ("docker_image" if table.docker_image else ".dockerignore")
    elif not (image := build.image):
        files = copied_files(build.copies, reader.tree(folder))
        written = [*map(posixpath.dirname, files), *artifacts]
        outside = {f"/{path.split('/')[1]}" for path in written if not f"{path}/".startswith(f"{workdir}/")}
        try:
            directories = [*DIRECTORIES.validate_python([workdir, *sorted(outside.difference(OWN))]), "/tests", "/logs"]
        except ValidationError as error:
            image, files = f"a copy, an artifact or WORKDIR in {error.errors()[0]['input']!r:.100}", {}
    return Place(
        workdir=workdir,
        image=image,
        image_name=name,
        docker_image=table.docker_image or "",
        directories=tuple(directories),
        files=files,
        env=table.env,
        has_tests=has_tests,
    )


class _Reader:
    """Bounded reading of regular files within one directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.digest = root, hashlib.sha256()
        self._bytes, self._files = MOST_BYTES, MOST_FILES
        self._trees: dict[str, Files] = {}

    def text(self, name: str) -> str:
        return decode_text(self._read(self.root / name)[0], name)

    def tree(self, name: str) -> Files:
        """Return the files of a folder by their path in it, if it exists. Links to files of the task are followed."""
        if name in self._trees:
            return self._trees[name]
        folder = self.root / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise ValueError(f"{name}/ is not a directory. Make it one.")
        files = self._trees[name] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() and path.is_dir():
                raise ValueError(f"{path.relative_to(self.root)} is a link to a directory. Copy the directory there.")
            if not path.is_dir():
                files[path.relative_to(folder).as_posix()] = self._read(path)
        return files

    def _read(self, path: Path) -> tuple[bytes, bool]:
        name = path.relative_to(self.root).as_posix()
        target = path.resolve()
        if not path.exists() and not path.is_symlink():
            raise ValueError(f"{name} is missing. Write it.")
        if not target.is_relative_to(self.root) or not target.is_file():
            raise ValueError(f"{name} is not a regular file within the directory. Copy the file there.")
        with target.open("rb") as file:
            content = file.read(self._bytes + 1)
        self._bytes, self._files = self._bytes - len(content), self._files - 1
        if self._bytes < 0 or self._files < 0:
            raise ValueError(f"it has more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB. Make it smaller.")
        is_program = bool(target.stat().st_mode & 0o100)
        self.digest.update(repr((name, is_program, len(content))).encode() + content)
        return content, is_program
