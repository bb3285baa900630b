"""Cancel during a training step in a separate process: no process remains, and another flow run continues the run."""

from __future__ import annotations

import psutil
import pytest

from roundhouse.store.stage import StageKind
from tests.flows.served import Served
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

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


def test_cancel_ends_a_trainer_that_is_a_process_of_its_own_and_another_flow_run_goes_on_where_it_was(
    served: Served,
) -> None:
    overrides = ["train.service.kind=process", "evaluation.before_training=false"]
    flow_run = served.start("train", preset="small", run_id="with-trainer", iterations=1000, overrides=overrides)
    until(lambda: bool(trainers(served)), "a trainer's process", evidence=lambda: served.evidence_of(flow_run))
    seen = served.processes()
    served.ask(flow_run, type="CANCELLING")
    until(lambda: served.state(flow_run) == "CANCELLED", "the cancelled state")
    until(lambda: not served.processes(), "the end of all processes")
    until(lambda: not [each for each in seen if each.is_running()], "the end of each that was seen")

    run = served.run("with-trainer")
    begun = max(int(name.split("/")[1]) for name in run.location.tree() if name.startswith("iterations/"))
    complete = {kind: reference for kind in StageKind if (reference := run.stage(begun, kind).reference()) is not None}
    assert {StageKind.REFIT, StageKind.COLLECT, StageKind.VALIDATE} <= complete.keys(), "its trainer was at work"
    again = served.start("train", preset="small", run_id="with-trainer", iterations=begun, overrides=overrides)
    assert served.wait(again, "COMPLETED", "FAILED", "CRASHED")["state"]["type"] == "COMPLETED"
    assert {kind: run.stage(begun, kind).reference() for kind in complete} == complete, "nothing is done again"
    assert run.latest_checkpoint().policy_version == begun
