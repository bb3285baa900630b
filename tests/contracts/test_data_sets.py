"""Rows of the package datasets: a data set with a limit is streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract("trl-1.16.0")
PROGRAM = """
import json, sys
from roundhouse.environments.dataset import hub_rows
print(json.dumps(hub_rows(sys.argv[1], None, "train", int(sys.argv[2]) or None)))
"""


def test_a_limit_streams_a_data_set_whose_later_files_are_not_read(foreign_python: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{number}?"} for number in range(4)]
    for part, content in (("0", "".join(json.dumps(row) + "\n" for row in rows)), ("1", '{"question": ')):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"train-0000{part}-of-00002.jsonl").write_text(content)
    site = next(foreign_python.parents[1].glob("lib/python*/site-packages"))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(site)])}
    variables |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def read(limit: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "set"), str(limit)]
        return subprocess.run(command, env=variables, check=False, capture_output=True, text=True)

    some, every = read(3), read(0)
    assert json.loads(some.stdout.splitlines()[-1]) == rows[:3], some.stderr
    assert "cannot be loaded" in every.stderr
