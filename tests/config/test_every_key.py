"""Every key of a configuration acts: a test fails when the product ignores the key.

The table shown_by.txt names such a test for each key. Ignoring the keys one after the other proves its lines
(`python -m tools.ignore_keys`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.conftest import COLLECTED
from tools.ignore_keys import READERS, all_keys, table

ROOT = Path(__file__).parents[2]


def test_every_key_has_a_line_in_the_table_of_the_tests_that_show_it(pytestconfig: pytest.Config) -> None:
    lines = table()
    assert [line.key for line in lines] == list(all_keys()), (
        "a new key needs a line in shown_by.txt (tools/ignore_keys.py)"
    )
    assert {line.readers for line in lines} <= {*READERS, "default"}
    collected = pytestconfig.stash[COLLECTED]
    files = {nodeid.split("::")[0] for nodeid in collected} if "::" not in " ".join(pytestconfig.args) else set()
    missing = [each.test for each in lines if each.test.split("::")[0] in files and each.test not in collected]
    missing += [line.test for line in lines if not (ROOT / line.test.split("::")[0]).exists()]
    assert not missing, "the table names tests that the suite does not have:\n" + "\n".join(missing)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", sorted({line.folder for line in table() if line.readers in READERS}))
def test_every_line_names_a_test_that_fails_when_the_key_is_ignored(folder: str) -> None:
    command = [sys.executable, "-m", "tools.ignore_keys", "--tests", folder]
    sweep = fork_server.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    verdicts = [line for line in sweep.stdout.splitlines() if " CPU s, " not in line]
    assert sweep.returncode == 0, "\n".join([*verdicts, sweep.stderr])
