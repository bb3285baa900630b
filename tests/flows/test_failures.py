"""The border of a stage and the recovery of an iteration, with a real Prefect server; failures are planted in the work."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.events.worker import EventsWorker

from roundhouse.activity import ACTIVITY, Stalled, run_interruptible
from roundhouse.config.loading import parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, DataError, DiskFull, InfraError
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.store.run import Run, open_run, skip_of
from roundhouse.store.stage import Reference
from roundhouse_flows.iteration import carry_out
from roundhouse_tasks.health import heartbeat, reporter_of
from roundhouse_tasks.options import stage_task
from tests.stages.test_checkpoint import model_directory, trained
from tests.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("prefect_client")]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    def make(**failures: Any) -> Run:
        tree = {
            "run_id": "r",
            "iterations": 3,
            "store": str(tmp_path / "store"),
            "tracking": {"enabled": False},
            "failures": failures,
        }
        run = open_run(parse_config(tree))
        if run.checkpoint(0).reference() is None:
            publish_starting_policy(run, model_directory(tmp_path / "0"), {})
        return run

    return make


def told(run: Run) -> list[tuple[str, str, str]]:
    return [(e.severity.value, e.module_name, e.details["code"]) for e in reporter_of(run).errors()]


class Planted:
    """Raises one planted error after another, then works."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def stage(work: Callable[[], Any]) -> Any:
    @stage_task(name="collect", task_run_name="collect {iteration}")
    def collect(run: Run, iteration: int) -> Any:
        return work()

    return collect.with_options(retry_delay_seconds=0, persist_result=False)


def as_flow(work: Callable[[], Any]) -> Any:
    return flow(name="test", validate_parameters=False)(work)()


@pytest.mark.parametrize(
    ("error", "raised", "calls", "severity", "code"),
    [
        (InfraError("engine away"), InfraError, 3, "error", "infra_error"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull, 3, "error", "disk_full"),
        (DataError("bad row"), DataError, 1, "error", "data_error"),
        (ConfigError("bad key"), ConfigError, 1, "critical", "config_error"),
        (KeyError("defect"), KeyError, 1, "critical", "unexpected_error"),
    ],
)
def test_only_infrastructure_failures_are_tried_again_and_each_is_reported(
    make_run: Callable[..., Run], error: Exception, raised: type[Exception], calls: int, severity: str, code: str
) -> None:
    run, work = make_run(), Planted(*[error] * 9)
    with pytest.raises(raised):
        as_flow(lambda: stage(work)(run, 1))
    assert work.calls == calls
    assert told(run) == [("warning", "collect", code)] * (calls - 1) + [(severity, "collect", code)]


def test_a_stage_that_hangs_is_given_up_tried_again_and_named(make_run: Callable[..., Run]) -> None:
    run = make_run(stall_seconds=0.3)
    healthy = threading.Event()

    async def rollout() -> str:
        with ACTIVITY.track("engine", "model call", "g0/1", "http://engine:8000"):
            if not healthy.is_set():
                healthy.set()
                await asyncio.Event().wait()
        return "collected"

    assert as_flow(lambda: stage(lambda: run_interruptible(rollout()))(run, 3)) == "collected"
    error, *slow = reporter_of(run).errors()  # a busy machine may not begin the next attempt in time either
    for each in (error, *slow):
        assert (each.severity.value, each.details["code"], each.work_context) == ("warning", "stalled", "iteration 3")
    assert "engine: model call g0/1 at http://engine:8000" in error.message
    assert error.exception_type == Stalled.__name__


def test_an_error_is_an_event_of_the_run_in_prefect(make_run: Callable[..., Run]) -> None:
    run = make_run()
    reporter_of(run).report_error("collect", "iteration 1", "away", details={"code": f"planted_{run.uid}"})
    EventsWorker.drain_all(timeout=30)
    asked = {"filter": {"event": {"name": [f"roundhouse.failure.planted_{run.uid}"]}}, "limit": 5}
    with get_client(sync_client=True) as client:
        events = until(lambda: client.request("POST", "/events/filter", json=asked).json()["events"], "the event there")
    assert events[0]["resource"]["prefect.resource.id"] == "roundhouse.run.r"
    assert (events[0]["payload"]["severity"], events[0]["payload"]["message"]) == ("error", "away")


def planted_iteration(tmp_path: Path, fails: dict[int, list[Exception]]) -> Any:
    """A sub-flow in the place of `iteration`, with planted errors by iteration."""

    @flow(name="iteration", validate_parameters=False)
    def iteration(config: RunConfig, k: int) -> Reference:
        if fails.get(k):
            raise fails[k].pop(0)
        run = open_run(config)
        return publish(run, trained(run, k, model_directory(tmp_path / f"v{k}", b"weights %d" % k)))

    return iteration


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The loop of the train flow over planted iterations; waiting takes no time."""
    monkeypatch.setattr("roundhouse.health.policy.FIRST_WAIT_SECONDS", 0.01)

    def carry(run: Run, fails: dict[int, list[Exception]]) -> None:
        planted = planted_iteration(tmp_path, fails)

        def loop() -> None:
            with heartbeat(run):
                for k in range(1, run.config.iterations + 1):
                    carry_out(run, k, by=planted)

        as_flow(loop)

    return carry


def test_stop_on_error_ends_the_run_at_the_first_failed_iteration(
    make_run: Callable[..., Run], train: Callable[..., None]
) -> None:
    run = make_run()
    with pytest.raises(DataError, match="refused"):
        train(run, {2: [DataError("12 of 12 rollouts were refused")]})
    assert run.checkpoint_versions() == [0, 1]


def test_continue_skips_data_and_defects_on_record_and_waits_for_infrastructure(
    make_run: Callable[..., Run], train: Callable[..., None], tmp_path: Path
) -> None:
    run = make_run(policy="continue")
    with get_client(sync_client=True) as client:
        first = FlowRunFilter.model_validate({"tags": {"all_": ["iteration:1"]}})
        before = {found.id for found in client.read_flow_runs(flow_run_filter=first)}
        train(
            run, {1: [InfraError("away"), InfraError("still away")], 2: [DataError("refused")], 3: [KeyError("defect")]}
        )
        tries = [found for found in client.read_flow_runs(flow_run_filter=first) if found.id not in before]
    states = sorted(found.state.type.value for found in tries if found.state is not None)
    assert states == ["COMPLETED", "FAILED", "FAILED"], "each try is a flow run of its own"
    assert run.checkpoint_versions() == [0, 1, 2, 3]
    assert (tmp_path / "v1").is_dir(), "iteration 1 was trained once the engine was back"
    assert [skip is not None and skip.code for skip in (skip_of(run, k) for k in (1, 2, 3))] == [
        False,
        "data_error",
        "unexpected_error",
    ]
    steps = [error.details["step"] for error in reporter_of(run).errors()]
    assert steps == ["wait", "wait", "skip", "skip"]
    assert run.is_reported(2)
    assert run.is_reported(3)


def test_stop_on_critical_ends_the_run_for_a_defect_and_not_for_data(
    make_run: Callable[..., Run], train: Callable[..., None]
) -> None:
    run = make_run(policy="stop_on_critical")
    with pytest.raises(KeyError):
        train(run, {1: [DataError("refused")], 2: [KeyError("defect")]})
    assert run.checkpoint_versions() == [0, 1]
    assert skip_of(run, 1) is not None


def test_a_run_that_would_skip_everything_ends(make_run: Callable[..., Run], train: Callable[..., None]) -> None:
    run = make_run(policy="continue", max_consecutive_skips=1)
    with pytest.raises(DataError):
        train(run, {k: [DataError("refused")] for k in (1, 2, 3)})
    assert run.checkpoint_versions() == [0, 1]
