"""Parts that the quickstart does not need are removable: an iteration imports none of them."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundhouse import plugins

ROOT = Path(__file__).parents[1]
FOLDERS = [module.name for module in pkgutil.iter_modules(plugins.__path__) if module.ispkg]
TRANSPORTS = [
    name
    for name in FOLDERS
    if any(key.startswith("weight_transport.") for key in importlib.import_module(f"roundhouse.plugins.{name}").PLUGINS)
]
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


def _imported(file: Path) -> Iterator[str]:
    """Yield the names that a file imports when it is imported itself."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Import):
            yield from (each.name for each in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{each.name}" for each in statement.names)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_tests_of_the_core_are_collected_without_a_weight_transport(name: str) -> None:
    own = ROOT / "tests" / "plugins" / name
    folders = tuple(f"{package}.plugins.{name}" for package in ("roundhouse", "tests"))
    needing = [
        str(file)
        for file in (ROOT / "tests").rglob("*.py")
        if not file.is_relative_to(own)
        and any(f"{each}.".startswith(f"{folder}.") for each in _imported(file) for folder in folders)
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
