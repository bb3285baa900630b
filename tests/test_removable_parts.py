"""Parts that the quickstart does not need are removable: an iteration imports none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REMOVABLE = (
    "roundhouse.compat",
    "roundhouse.infra.kubernetes",
    "roundhouse.launch.kubernetes_jobs",
    "roundhouse.sql",
    "roundhouse.view",
    # collection while training runs, and the simulator of its controller
    "roundhouse_flows.generation",
    "roundhouse.collection.asynchronous",
    "roundhouse.simulation",
    "roundhouse.stages.prefetch",
)

WITHOUT = """
import runpy, sys

class Removed:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{part}.") for part in sys.argv[2:]):
            raise ModuleNotFoundError(f"{name} was removed")

sys.meta_path.insert(0, Removed())
import roundhouse_flows.train
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_imports_point_downwards_only() -> None:
    """The contracts of pyproject.toml, which `make check` holds, too: nothing else of the suite would see one broken."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


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


def imported_with_the_module(node: ast.AST) -> set[str]:
    """Names of the modules that are imported outside of functions."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            found |= {child.module, *(f"{child.module}.{name.name}" for name in child.names)}
        elif isinstance(child, ast.Import):
            found |= {name.name for name in child.names}
        found |= imported_with_the_module(child)
    return found


def test_no_module_imports_the_compatibility_with_foreign_worlds_at_its_start() -> None:
    """A run imports the modules of a plug-in only if it names the plug-in."""
    files = [*ROOT.glob("roundhouse/**/*.py"), *ROOT.glob("flows/**/*.py"), *ROOT.glob("tasks/**/*.py")]
    users = {
        name
        for file in files
        if not (name := str(file.relative_to(ROOT))).startswith(("roundhouse/compat/", "roundhouse/plugins/"))
        and any(
            module.startswith("roundhouse.compat") for module in imported_with_the_module(ast.parse(file.read_text()))
        )
    }
    assert users == set()
