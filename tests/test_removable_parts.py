"""What the quickstart does not need can be taken away: an iteration imports none of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REMOVABLE = ("roundhouse.compat", "roundhouse.infra.kubernetes", "roundhouse.query", "roundhouse.view")

WITHOUT = """
import runpy, sys

class Removed:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{part}.") for part in sys.argv[2:]):
            raise ModuleNotFoundError(f"{name} was removed")

sys.meta_path.insert(0, Removed())
import flows.train
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_an_iteration_runs_without_the_removable_parts() -> None:
    """Refit, collection, validation and a training step, beside the import of the flow; all parts are away."""
    way = ROOT / "tools" / "measure_way.py"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(way), *REMOVABLE], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    entered = done.stdout.splitlines()
    assert "roundhouse.training.step" in entered
    assert not [name for name in entered if name.startswith(REMOVABLE)]
