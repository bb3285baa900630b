"""Ranks on machines that share only a bucket train byte for byte like as many ranks of one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundhouse.stages import train as stage
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.run import Run
from tests.stages.test_train import checkpoint_digests, make_run, sequences

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TWO_MACHINES = "tests.launch.machines:TwoMachines"


@pytest.fixture(scope="module")
def namespaces() -> None:
    attempt = [sys.executable, "-c", "from tests.launch.machines import have_own_files; have_own_files()"]
    if subprocess.run(attempt, capture_output=True).returncode:
        pytest.skip("a mount namespace of one's own needs CAP_SYS_ADMIN")


def versions(run: Run, cache: Path, count: int, anew: int | None = None) -> list[dict[str, str]]:
    """Return the files of so many iterations; the trainer of number `anew` begins from the store."""
    base, found = starting_policy(run), []
    for iteration in range(1, count + 1):
        if iteration == anew:
            stage.release_trainer()
        base = publish(run, train_iteration(run, iteration, sequences(run, iteration), base, cache))
        found.append(checkpoint_digests(base))
    stage.release_trainer()
    return found


@pytest.mark.parametrize(("kind", "processes", "count"), [("resident", 2, 3), ("process", 1, 2)])
def test_what_machines_without_a_common_disk_write_is_what_one_machine_writes(
    namespaces: None,
    bucket: str,
    tmp_path: Path,
    kind: str,
    processes: int,
    count: int,
) -> None:
    """Ranks that stay begin from the store once; those of a process a step always do."""

    def run(name: str, **service: Any) -> Run:
        return make_run(f"{bucket}/{name}", tmp_path / name, **service)

    apart = run("apart", kind=kind, processes=processes, launcher=TWO_MACHINES)
    together = run("together", kind="resident", processes=2 * processes)
    assert versions(apart, tmp_path / "apart", count, anew=3) == versions(together, tmp_path / "together", count)
