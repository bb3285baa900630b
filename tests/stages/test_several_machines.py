"""Ranks on machines that share only a bucket train byte for byte like as many ranks of one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roundhouse.stages import trainer_home
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
            trainer_home.release_trainers()
        base = publish(run, train_iteration(run, iteration, sequences(run, iteration), base, cache))
        found.append(checkpoint_digests(base))
    trainer_home.release_trainers()
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What two ranks of this machine write."""
    place = tmp_path_factory.mktemp("together")
    return versions(make_run(str(place / "store"), place, kind="resident", processes=2), place / "cache", 3)


@pytest.mark.parametrize(("kind", "count"), [("resident", 3), ("process", 2)])
def test_what_machines_without_a_common_disk_write_is_what_one_machine_writes(
    namespaces: None, bucket: str, tmp_path: Path, together: list[dict[str, str]], kind: str, count: int
) -> None:
    """Ranks that stay begin from the store once; those of a process a step always do."""
    apart = make_run(f"{bucket}/apart", tmp_path, kind=kind, processes=1, launcher=TWO_MACHINES)
    assert versions(apart, tmp_path / "cache", count, anew=3) == together[:count]
