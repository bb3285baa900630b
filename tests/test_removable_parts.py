"""Parts that the quickstart does not need are removable: an iteration imports none of them."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from roundhouse import plugins

ROOT = Path(__file__).parents[1]
FOLDERS = [module.name for module in pkgutil.iter_modules(plugins.__path__) if module.ispkg]
NEEDED_BY = {"nemo_gym": {"atif", "kubernetes", "mcp", "programs", "view"}, "programs": {"kubernetes", "nemo_gym"}}
"""Plug-ins whose tests play with another one's servers or files."""
REMOVABLE = (
    *(f"roundhouse.plugins.{name}" for name in FOLDERS),
    "roundhouse.sql",
    # collection while training runs
    "roundhouse_flows.generation",
    "roundhouse.collection.asynchronous",
    "roundhouse.stages.prefetch",
)

WITHOUT = """
import runpy, sys

class Removed:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{part}.") for part in sys.argv[2:]):
            raise ModuleNotFoundError(f"{name} was removed")

sys.meta_path.insert(0, Removed())
import roundhouse.plugins
roundhouse.plugins.__path__ = []
import roundhouse_flows.train
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_imports_point_downwards_only() -> None:
    """The contracts of pyproject.toml, which `make check` holds, too: nothing else of the suite would see one broken."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def _imported(statements: Sequence[ast.stmt | ast.ExceptHandler]) -> Iterator[str]:
    """Yield the names that a module with these statements imports when it is imported itself."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (each.name for each in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{each.name}" for each in statement.names)
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from _imported(statement.orelse)
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _imported(getattr(statement, part, []))


@pytest.fixture(scope="module")
def imports() -> dict[Path, set[str]]:
    """What each file imports that the core's tests consist of or may import; not those against foreign packages."""
    files = [file for folder in ("tests", "tools") for file in (ROOT / folder).rglob("*.py")]
    files = [file for file in files if not file.is_relative_to(ROOT / "tests" / "contracts")]
    return {file: set(_imported(ast.parse(file.read_text()).body)) for file in files}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tests_of_the_core_are_collected_without_a_plug_in(name: str, imports: dict[Path, set[str]]) -> None:
    theirs = [ROOT / "tests" / "plugins" / each for each in (name, *NEEDED_BY.get(name, ()))]
    folders = tuple(f"{package}.plugins.{name}." for package in ("roundhouse", "tests"))
    needing = [
        str(file.relative_to(ROOT))
        for file, names in imports.items()
        if not any(file.is_relative_to(folder) for folder in theirs)
        and any(f"{each}.".startswith(folders) for each in names)
    ]
    assert needing == []


@pytest.mark.real
def test_an_iteration_runs_without_the_removable_parts() -> None:
    """Refit, collection, validation, a training step and the import of the flow, with all of these parts removed."""
    way = ROOT / "tools" / "measure_way.py"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(way), *REMOVABLE], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    entered = done.stdout.splitlines()
    assert "roundhouse.training.trainer" in entered
    assert not [name for name in entered if name.startswith(REMOVABLE)]
