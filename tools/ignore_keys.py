"""Whether a test fails when a configuration key is ignored: the proof behind tests/config/shown_by.txt.

    python -m tools.ignore_keys                                     every line: its test passes, and fails when the product
                                                                    reads the key's default whatever was configured
    python -m tools.ignore_keys --keys RolloutConfig.concurrency    these lines
    python -m tools.ignore_keys --find tests/stages                 lines for open keys, from the tests of these files

A line is a key, who reads the default, and a test. `product`: code in roundhouse, flows and tasks reads the default and code
in tests what was configured, so a test that parses a configuration and compares keys shows nothing. `config`: roundhouse.config
reads the default too; of a key that the sections' own checks refuse or combine. `default`: a `kind` that nobody has to choose.
`open`: no test is known yet that fails without the key. Of a `kind`, everybody gets the default form. Each test runs in a fork
of a process that has imported everything, with fixtures of its own. Processes that a test starts read what was configured.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import re
import select
import sys
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.runner import runtestprotocol
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from roundhouse.config.gym_servers import AgentServerConfig, EnvironmentServerConfig, ModelServerConfig
from roundhouse.config.models import RunConfig, WarmStartPolicy
from roundhouse.config.section import Section

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/config/shown_by.txt"
PRODUCT = tuple(f"{ROOT / folder}{os.sep}" for folder in ("roundhouse", "flows", "tasks"))
CONFIG = f"{ROOT / 'roundhouse/config'}{os.sep}"
READERS = ("product", "config")
"""Who ignores a key: the product without roundhouse.config, or with it."""
IMPORTED = ("torch", "transformers", "mlflow", "prefect", "ray", "pyarrow.dataset", "duckdb", "fastapi", "s3fs")
ROOTS = (RunConfig, AgentServerConfig, EnvironmentServerConfig, ModelServerConfig)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    key: str
    readers: str
    test: str = ""


def table() -> list[Line]:
    """The table, in its order."""
    return [Line(*line.split(" ", 2)) for line in TABLE.read_text().splitlines() if not line.startswith("#")]


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
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


def all_keys() -> dict[str, type[BaseModel]]:
    """Every key that has more than one value as `Section.key`, with the section that declares it."""
    owners = [
        (declared(each, key), key)
        for root in ROOTS
        for each in sections(root)
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

    def of_owner(section: Any) -> bool:
        return name != "kind" and name in type(section).model_fields and declared(type(section), name) is owner

    def read(self: Any, attribute: str) -> Any:
        value = BaseModel.__getattribute__(self, attribute)
        if name == "kind":  # the section of this kind is not taken for one
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

    target: Any = Section if name == "kind" else owner
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
    """What the work returns, done in a fork; None where it takes too long or dies. Nothing that the work started is left: what
    loses its parent becomes a child of this process, services in sessions of their own too."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
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
    while started := psutil.Process().children(recursive=True):
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                continue
    return json.loads(text) if text.endswith(b"\n") else None


def outcome(item: pytest.Item) -> str:
    """How the test ends: passed, failed or skipped."""
    ends = {report.outcome for report in runtestprotocol(item, log=False, nextitem=None)}
    return next((end for end in ("failed", "skipped") if end in ends), "passed")


def outcome_without(item: pytest.Item, line: Line) -> str:
    ignore(line)
    return outcome(item)


class Sweep:
    """Runs the tests of the table, each as it is and with its keys ignored."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.wrong: list[str] = [f"{line.key}: {line.test} is not collected" for line in lines]

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        for line in [each for each in self.lines if each.test == item.nodeid]:
            self.wrong.remove(f"{line.key}: {line.test} is not collected")
            ended = forked(lambda: outcome(item), 300)
            if ended != "passed":
                self.wrong.append(f"{line.key}: {line.test} {ended or 'did not end'}")
                continue
            ended = forked(lambda line=line: outcome_without(item, line), 120)  # type: ignore[misc]
            if ended != "failed":
                self.wrong.append(f"{line.key}: ignored, and {line.test} {ended or 'did not end'}")
        return True


class Search:
    """Looks through tests for those that show a key: of each, the tests whose text names a key that is left."""

    def __init__(self, left: set[str]) -> None:
        self.left = left

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
                print(key, readers, item.nodeid, file=sys.__stdout__, flush=True)
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find", nargs="+", metavar="PATH", help="files of tests")
    parser.add_argument("--keys", nargs="+", metavar="SECTION.KEY")
    options = parser.parse_args()
    for module in IMPORTED:
        importlib.import_module(module)
    quiet = ["-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:terminalreporter"]
    lines = [line for line in table() if line.key in (options.keys or all_keys()) and line.readers in READERS]
    if options.find:
        search = Search(set(options.keys or {line.key for line in table() if line.readers == "open"}))
        return int(pytest.main([*quiet, *options.find], plugins=[search]))
    sweep = Sweep(lines)
    pytest.main([*quiet, *dict.fromkeys(line.test for line in lines)], plugins=[sweep])
    print(*sweep.wrong, f"{len(lines) - len(sweep.wrong)} of {len(lines)} keys are shown by their tests", sep="\n")
    return int(bool(sweep.wrong))


if __name__ == "__main__":
    sys.exit(main())
