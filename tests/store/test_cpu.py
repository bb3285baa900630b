"""CPU seconds of concurrent stages can be added up."""

from __future__ import annotations

import resource
import threading
import time

import pytest

from roundhouse.config.models import RunConfig
from roundhouse.cpu import attribute_to_this_stage
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest

BURNT = 0.3
PATIENCE = 60.0


def burn(seconds: float = BURNT) -> None:
    """Use so many CPU seconds of this thread."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        sum(range(1000))


def process_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("ends_before", [True, False], ids=["the thread has ended", "the thread is at work"])
def test_a_second_counts_for_the_stage_beside_or_for_the_one_of_the_process_never_for_both(
    run_config: RunConfig, ends_before: bool
) -> None:
    run = open_run(run_config)
    burnt, go_on, found = threading.Event(), threading.Event(), {}

    def collect() -> None:
        with attribute_to_this_stage():
            attempt = run.begin(run.stage(2, "collect"), policy_version=1)
            burn()
            burnt.set()
            assert go_on.wait(PATIENCE)
            found["collect"] = attempt.commit()

    before = process_seconds()
    lane = threading.Thread(target=collect)
    train = run.begin(run.stage(1, "train"), policy_version=0)
    lane.start()
    burn()
    assert burnt.wait(PATIENCE)
    if ends_before:
        go_on.set()
        lane.join(PATIENCE)
    found["train"] = train.commit()
    go_on.set()
    lane.join(PATIENCE)
    in_all = process_seconds() - before

    seconds = {kind: read_manifest(reference).resources["cpu_seconds"] for kind, reference in found.items()}
    assert min(seconds.values()) >= BURNT - 0.01
    assert sum(seconds.values()) <= in_all + 0.01


def test_a_block_in_a_block_changes_nothing(run_config: RunConfig) -> None:
    run = open_run(run_config)
    with attribute_to_this_stage():
        attempt = run.begin(run.stage(1, "collect"), policy_version=0)
        with attribute_to_this_stage():
            burn()
        burn()
        committed = attempt.commit()
    assert read_manifest(committed).resources["cpu_seconds"] >= 2 * BURNT - 0.01
    alone = run.begin(run.stage(1, "train"), policy_version=0)
    burn()
    assert read_manifest(alone.commit()).resources["cpu_seconds"] >= BURNT - 0.01
