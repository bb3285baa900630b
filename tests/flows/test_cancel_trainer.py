"""Cancel while a training step runs as a process of its own: nothing of the run is left."""

from __future__ import annotations

import psutil
import pytest

from tests.flows.served import Served, until

pytestmark = pytest.mark.timeout(900)

TRAINER = "roundhouse.training.service.one_shot"


def trainers(served: Served) -> list[psutil.Process]:
    found = []
    for process in served.processes():
        try:
            if TRAINER in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_cancel_ends_a_trainer_that_is_a_process_of_its_own(served: Served) -> None:
    overrides = ["train.service.kind=process", "iterations=1000", "evaluation.before_training=false"]
    flow_run = served.start("train", preset="small", run_id="with-trainer", overrides=overrides)
    until(lambda: bool(trainers(served)), "a trainer's process", lambda: served._evidence(flow_run))
    seen = served.processes()
    served.ask(flow_run, type="CANCELLING")
    until(lambda: served.state(flow_run) == "CANCELLED", "the cancelled state", seconds=120)
    until(lambda: not served.processes(), "the end of all processes", seconds=60)
    until(lambda: not [each for each in seen if each.is_running()], "the end of each that was seen", seconds=60)
