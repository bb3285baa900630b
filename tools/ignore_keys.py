"""Prove that a test fails when a configuration key is ignored: the evidence of tests/config/shown_by.txt.

    python -m tools.ignore_keys                                     every line: its test passes, and fails when the product
                                                                    reads the key's default whatever was configured
    python -m tools.ignore_keys --keys RolloutConfig.concurrency    these lines
    python -m tools.ignore_keys --tests tests/gym                   lines of tests in this folder, not in folders below it
    python -m tools.ignore_keys --find tests/stages                 lines for keys without one, from the tests of these files

A line is a key, who reads the default, and a test. `product`: code in roundhouse, flows and tasks reads the default and code
in tests what was configured, so a test that parses a configuration and compares keys shows nothing. `config`: roundhouse.config
reads the default too; of a key that the sections' own checks refuse or combine. `default`: a `kind` that nobody has to choose.
Of a `kind`, everybody gets the default form. Each test runs in a fork of a process that has imported everything, with fixtures
of its own. Processes that a test starts read what was configured.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import resource
import select
import sys
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest
from _pytest.runner import runtestprotocol
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from roundhouse import plugins
from roundhouse.config.kinds import Kinds
from roundhouse.config.models import RunConfig, WarmStartPolicy
from roundhouse.config.section import Section

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/config/shown_by.txt"
FOLDERS = (
    "roundhouse",
    "flows",
    "tasks",
    "roundhouse_flows",
    "roundhouse_tasks",
)  # an editable installation resolves links
PRODUCT = tuple(f"{ROOT / folder}{os.sep}" for folder in FOLDERS)
IN_TABLE = (
    "container_sandbox",
    "example_environments",
    "kubernetes_sandbox",
    "nemo_gym",
    "nexrl",
    "programs",
    "tinker",
)
"""Plug-ins whose keys have lines; tests/contracts hold the others to their packages."""
CONFIG = (
    f"{ROOT / 'roundhouse/config'}{os.sep}",
    *(
        str(ROOT / f"roundhouse/plugins/{name}/{file}.py")
        for name in IN_TABLE
        for file in ("section", "server_sections", "model_server/section")
    ),
)
READERS = ("product", "config")
"""Who ignores a key: the product without roundhouse.config, or with it."""
IMPORTED = ("torch", "transformers", "mlflow", "prefect", "ray", "pyarrow.dataset", "duckdb", "fastapi", "s3fs")
SERVERS = (
    ("nemo_gym.server_sections", "AgentServerConfig"),
    ("nemo_gym.server_sections", "EnvironmentServerConfig"),
    ("programs.model_server.section", "ModelServerConfig"),
)
"""Sections of servers: module of the plug-ins, and name."""


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    key: str
    readers: str
    test: str = ""

    @property
    def folder(self) -> str:
        return str(Path(self.test.partition("::")[0]).parent)


def table() -> list[Line]:
    """The table, in its order."""
    return [Line(*line.split(" ", 2)) for line in TABLE.read_text().splitlines() if not line.startswith("#")]


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type speaks of."""
    if isinstance(annotation, Kinds):
        for kind in annotation.sections():
            yield from sections(kind)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            for each in (field.annotation, *field.metadata):
                yield from sections(each)
    for argument in typing.get_args(annotation):
        yield from sections(argument)


def declared(section: type[BaseModel], key: str) -> type[BaseModel]:
    """The section that declares the key: itself, or one that it extends."""
    return next(each for each in section.__mro__ if key in inspect.get_annotations(each))


def has_one_value(section: type[BaseModel], key: str) -> bool:
    """A key of which any other value is refused by its type."""
    field = section.model_fields[key]
    if typing.get_origin(field.annotation) is typing.Literal:
        return len(typing.get_args(field.annotation)) == 1
    bounds = {bound: getattr(each, bound) for each in field.metadata for bound in ("ge", "le") if hasattr(each, bound)}
    return field.annotation is type(None) or (len(bounds) == 2 and bounds["ge"] == bounds["le"])


def roots() -> list[type[BaseModel]]:
    """The sections that are read from files: a run's, and those of servers whose plug-ins are here."""
    folders = {module.name for module in pkgutil.iter_modules(plugins.__path__) if module.ispkg}
    servers = [(module, name) for module, name in SERVERS if module.partition(".")[0] in folders]
    return [RunConfig, *(getattr(importlib.import_module(f"roundhouse.plugins.{m}"), name) for m, name in servers)]


@functools.cache
def all_keys() -> dict[str, type[BaseModel]]:
    """Every key that has more than one value as `Section.key`, with the section that declares it."""
    owners = [
        (declared(each, key), key)
        for root in roots()
        for each in sections(root)
        if not each.__module__.startswith("roundhouse.plugins.") or each.__module__.split(".")[2] in IN_TABLE
        for key in each.model_fields
        if key == "kind" or not has_one_value(declared(each, key), key)
    ]
    return dict(sorted((f"{owner.__name__}.{key}", owner) for owner, key in owners))


def default_of(section: Any, key: str) -> Any:
    """What the key is when nobody sets it; of a required key, a value that nobody sets."""
    default = type(section).model_fields[key].get_default(call_default_factory=True)
    if default is not PydanticUndefined:
        return default
    given = section.__dict__[key]
    if isinstance(given, Section):
        return WarmStartPolicy()
    return {str: "ignored", int: 1}.get(type(given), type(given)())


def reader() -> str | None:
    """Who reads: the code that called the caller."""
    file = sys._getframe(2).f_code.co_filename
    if not file.startswith(PRODUCT):
        return None
    return "config" if file.startswith(CONFIG) else "product"


def ignore(line: Line) -> None:
    """From now on this process reads the key's default."""
    name = line.key.split(".")[1]
    owner = all_keys()[line.key]
    ignoring = READERS[: READERS.index(line.readers) + 1]

    chooses = name == "kind" and has_one_value(owner, name)  # among sections; any other `kind` is an ordinary key

    def of_owner(section: Any) -> bool:
        return not chooses and name in type(section).model_fields and declared(type(section), name) is owner

    def read(self: Any, attribute: str) -> Any:
        value = BaseModel.__getattribute__(self, attribute)
        if chooses:  # the section of this kind is not taken for one
            if type(value) is owner and attribute in type(self).model_fields:
                return default_of(self, attribute) or value
        elif attribute == name and of_owner(self) and reader() in ignoring:
            return default_of(self, name)
        return value

    def dump(self: Any, **options: Any) -> dict[str, Any]:
        if of_owner(self) and reader() in ignoring:
            self = self.model_copy(update={name: default_of(self, name)})
        return BaseModel.model_dump(self, **options)

    def pairs(self: Any) -> Iterator[tuple[str, Any]]:
        who = reader()
        for each, value in BaseModel.__iter__(self):
            yield each, default_of(self, name) if each == name and of_owner(self) and who in ignoring else value

    target: Any = Section if chooses else owner
    target.__getattribute__ = read
    target.__iter__ = pairs
    target.model_dump = dump


def record(reads: set[tuple[str, str]]) -> None:
    """From now on this process notes which keys the product reads that are not at their defaults, and who reads."""

    def note(section: Any, key: str, who: str) -> None:
        value, default = section.__dict__[key], default_of(section, key)
        if isinstance(value, Section) and "kind" in type(value).model_fields and type(default) is not type(value):
            reads.add((f"{type(value).__name__}.kind", who))
        if value is not default and value != default:
            reads.add((f"{declared(type(section), key).__name__}.{key}", who))

    def read(self: Any, attribute: str) -> Any:
        value = BaseModel.__getattribute__(self, attribute)
        if attribute in type(self).model_fields and (who := reader()):
            note(self, attribute, who)
        return value

    def dump(self: Any, **options: Any) -> dict[str, Any]:
        if who := reader():
            for key in type(self).model_fields:
                note(self, key, who)
        return BaseModel.model_dump(self, **options)

    target: Any = Section
    target.__getattribute__ = read
    target.model_dump = dump


PR_SET_CHILD_SUBREAPER = 36


def forked(work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of the work, done in a fork; None if it takes too long or dies.

    All processes that the work started are killed: those that lose their parent become children of this process, services in
    sessions of their own too. The fork server of the tests' programs stays.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    others = psutil.Process().children(recursive=True)
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with contextlib.suppress(BaseException):
            os.write(here, json.dumps(work()).encode() + b"\n")
        os._exit(0)
    os.close(here)
    text, deadline = b"", time.monotonic() + seconds
    while not text.endswith(b"\n") and select.select([there], [], [], max(0, deadline - time.monotonic()))[0]:
        piece = os.read(there, 1 << 16)
        if not piece:
            break
        text += piece
    os.close(there)
    while started := [each for each in psutil.Process().children(recursive=True) if each not in others]:
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=0.1)  # an orphan can be waited for once it is a child of this process
    return json.loads(text) if text.endswith(b"\n") else None


def outcome(item: pytest.Item) -> str:
    """How the test ends: passed, failed or skipped."""
    ends = {report.outcome for report in runtestprotocol(item, log=False, nextitem=None)}
    return next((end for end in ("failed", "skipped") if end in ends), "passed")


def outcome_without(item: pytest.Item, line: Line) -> str:
    ignore(line)
    return outcome(item)


def children_seconds() -> float:
    """Return the CPU seconds of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Sweep:
    """Run the tests of the table, each as it is and with its keys ignored.

    Args:
        output: gets the cost of each run at once.
    """

    def __init__(self, lines: list[Line], output: TextIO) -> None:
        self.lines = lines
        self.wrong: list[str] = [f"{line.key}: {line.test} is not collected" for line in lines]
        self.output = output

    def _run(self, item: pytest.Item, line: Line | None = None) -> str | None:
        """Return how a test ends in a fork."""
        used, began = children_seconds(), time.monotonic()
        limit = 300 if line is None else 120
        ended = forked(lambda: outcome(item) if line is None else outcome_without(item, line), limit)
        cost = f"{children_seconds() - used:6.2f} CPU s, {time.monotonic() - began:6.2f} s"
        print(cost, item.nodeid, "" if line is None else f"without {line.key}", file=self.output)
        return ended

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        lines = [each for each in self.lines if each.test == item.nodeid]
        ended = self._run(item) if lines else None
        for line in lines:
            self.wrong.remove(f"{line.key}: {line.test} is not collected")
            if ended == "skipped":
                print(f"{line.key}: not tried, since {line.test} is skipped here", file=self.output)
                continue
            if ended != "passed":
                self.wrong.append(f"{line.key}: {line.test} {ended or 'did not end'}")
                continue
            ignoring = self._run(item, line)
            if ignoring != "failed":
                self.wrong.append(f"{line.key}: ignored, and {line.test} {ignoring or 'did not end'}")
        return True


class Search:
    """Looks through tests for those that show a key: of each, the tests whose text names a key that is left."""

    def __init__(self, left: set[str], output: TextIO) -> None:
        self.left = left
        self.output = output

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        text = inspect.getsource(item.function) + repr(getattr(getattr(item, "callspec", None), "params", ""))  # type: ignore[attr-defined]
        words = set(re.findall(r"\w+", text))
        if not any(key.split(".")[1] in words for key in self.left):
            return True

        def recorded() -> tuple[str, list[tuple[str, str]]]:
            reads: set[tuple[str, str]] = set()
            record(reads)
            return outcome(item), sorted(reads, key=lambda read: (-READERS.index(read[1]), read[0]), reverse=True)

        ended, reads = forked(recorded, 300) or ("", [])
        for key, readers in reads if ended == "passed" else []:
            line = Line(key, readers, item.nodeid)
            if key in self.left and forked(lambda line=line: outcome_without(item, line), 60) == "failed":  # type: ignore[misc]
                self.left.discard(key)
                print(key, readers, item.nodeid, file=self.output)
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find", nargs="+", metavar="PATH", help="files of tests")
    parser.add_argument("--keys", nargs="+", metavar="SECTION.KEY")
    parser.add_argument("--tests", metavar="FOLDER")
    options = parser.parse_args()
    for module in IMPORTED:
        importlib.import_module(module)
    quiet = ["-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:terminalreporter"]
    output = os.fdopen(os.dup(1), "w", buffering=1)  # pytest captures the other
    if options.find:
        search = Search(set(options.keys or all_keys().keys() - {line.key for line in table()}), output)
        return int(pytest.main([*quiet, *options.find], plugins=[search]))
    lines = [line for line in table() if line.key in (options.keys or all_keys()) and line.readers in READERS]
    lines = [line for line in lines if options.tests in (None, line.folder)]
    sweep = Sweep(lines, output)
    pytest.main([*quiet, *dict.fromkeys(line.test for line in lines)], plugins=[sweep])
    print(*sweep.wrong, f"{len(lines) - len(sweep.wrong)} of {len(lines)} keys are shown by their tests", sep="\n")
    return int(bool(sweep.wrong))


if __name__ == "__main__":
    sys.exit(main())
