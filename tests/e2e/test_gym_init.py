"""The files of `roundhouse gym init` are trained unchanged, with real services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundhouse.store.run import load_run

ROUNDHOUSE = str(Path(sys.executable).with_name("roundhouse"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_new_environment_is_trained_through_an_iteration(tmp_path: Path) -> None:
    """With a short warm start: the test shows that the files fit together, not that the policy learns."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def type_in(*words: str) -> str:
        done = subprocess.run(
            [ROUNDHOUSE, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    type_in("gym", "init", "words")
    try:
        shown = type_in("train", "words/run.yaml", "--set", "iterations=1", "--set", "policy.steps=40")
        run = load_run(str(tmp_path / ".roundhouse/store"), "words")
        assert "64 requested" in shown
        assert run.checkpoint_versions() == [0, 1]
        assert run.is_reported(1)
    finally:
        type_in("down")
