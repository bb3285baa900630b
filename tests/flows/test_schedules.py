"""Scheduled collection on a real Prefect server: planned, missed and late runs, and flow runs without a process."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, StoreError
from roundhouse.stages.datasets import TaskDraw, collected_moments, dataset_stage
from roundhouse.store.run import open_run
from roundhouse_flows._prefect.orphans import settle_orphans
from roundhouse_flows.controls import pause
from roundhouse_flows.deployments import deployments
from roundhouse_flows.forms import CollectForm
from roundhouse_flows.schedules import add_schedule, back_fill, missed, remove_schedule, schedules
from tests.flows.served import Served
from tests.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NIGHTS = [datetime(2026, 11, day, 2, tzinfo=UTC) for day in (18, 19, 20)]


@pytest.fixture
def form(prefect_client: Served) -> CollectForm:
    """A nightly collection of a run that has done nothing yet."""
    store = prefect_client.store
    open_run(parse_config({"run_id": "source", "store": store}))
    return CollectForm(run_id="source", store=store, name="nights", keep_last=2)


def test_a_schedule_is_one_a_dataset_and_survives_a_new_registration_of_the_deployments(form: CollectForm) -> None:
    add_schedule(form, "0 3 * * *")
    made = add_schedule(form, "0 2 * * *", "Europe/Berlin")
    assert (made.cron, made.timezone, made.form) == ("0 2 * * *", "Europe/Berlin", form)
    assert made.next_moment is not None
    assert datetime.now(UTC) < made.next_moment < datetime.now(UTC) + timedelta(days=1, hours=1)

    import asyncio

    async def register() -> None:
        for deployment in await deployments():
            await deployment.aapply()

    asyncio.run(register())
    assert [each.id for each in schedules()] == [made.id]
    remove_schedule("nights")
    assert schedules() == []


def test_planned_flow_runs_keep_their_moment_through_a_retry(form: CollectForm, served: Served) -> None:
    deployment = served.deployment("collect")["id"]
    wanted = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
    add_schedule(form, "0 2 * * *")
    planned = until(lambda: served.call("POST", "flow_runs/filter", **wanted), "the scheduler's look, once a minute")
    assert len(planned) > 1
    assert len({run["expected_start_time"] for run in planned}) == len(planned)
    for run in planned:
        assert run["auto_scheduled"]
        assert datetime.fromisoformat(run["expected_start_time"]).hour == 2
        assert run["parameters"]["settings"]["name"] == "nights"
    retried, *_ = planned
    again = {"type": "SCHEDULED", "name": "AwaitingRetry", "state_details": {"scheduled_time": "2030-01-01T00:00:00Z"}}
    for state in ({"type": "RUNNING"}, {"type": "FAILED"}, again):
        served.call("POST", f"flow_runs/{retried['id']}/set_state", state=state, force=True)
    after = served.call("GET", f"flow_runs/{retried['id']}")
    kept = ("expected_start_time", "auto_scheduled")
    assert [after[name] for name in kept] == [retried[name] for name in kept], "a retry is for the same night"
    served.call("DELETE", f"flow_runs/{retried['id']}")
    remove_schedule("nights")
    assert served.call("POST", "flow_runs/filter", **wanted) == [], "a removed schedule plans nothing"


def test_missed_moments_are_those_without_a_complete_version_and_a_back_fill_asks_for_each(
    form: CollectForm, served: Served
) -> None:
    add_schedule(form, "0 2 * * *")
    run = served.run("source")
    draw = TaskDraw.of_moment(NIGHTS[1])
    run.begin(dataset_stage(run, "nights", draw.label(0), draw), policy_version=0).commit()
    assert collected_moments(served.store, "nights") == {"20261119T020000Z"}
    end = NIGHTS[2] + timedelta(hours=1)
    assert missed("nights", NIGHTS[0], end) == [NIGHTS[0], NIGHTS[2]]
    assert missed("nights", NIGHTS[0], NIGHTS[2]) == [NIGHTS[0]], "the end is not in it"
    with pytest.raises(ConfigError, match="more than 100 moments"):
        missed("nights", NIGHTS[0] - timedelta(days=200), end)

    [started] = back_fill("nights", [NIGHTS[0]])
    asked = served.call("GET", f"flow_runs/{started}")
    assert asked["parameters"]["settings"]["moment"] == "2026-11-18T02:00:00Z"
    assert "back-fill" in asked["tags"]
    served.call("DELETE", f"flow_runs/{started}")
    remove_schedule("nights")


def test_what_is_no_schedule_is_refused_by_name(form: CollectForm) -> None:
    with pytest.raises(ConfigError, match=re.escape("--cron 'every night'")):
        add_schedule(form, "every night")
    with pytest.raises(ConfigError, match="Mars"):
        add_schedule(form, "0 2 * * *", "Mars/Olympus")
    with pytest.raises(ConfigError, match=r"No schedule collects into 'nothing'. Available: none"):
        remove_schedule("nothing")
    with pytest.raises(StoreError, match="no deployment has started one"):
        pause("source")


async def test_a_flow_run_whose_process_is_gone_gets_a_state_that_a_person_can_act_on(prefect_client: Served) -> None:
    evaluate = prefect_client.deployment("evaluate")["id"]
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    found = {}
    for state in ("RUNNING", "CANCELLING"):
        asked = {"parameters": {"settings": {"run_id": "gone"}}, "state": {"type": "SCHEDULED"}}
        asked["state"]["state_details"] = {"scheduled_time": later}
        run = prefect_client.call("POST", f"deployments/{evaluate}/create_flow_run", **asked)["id"]
        prefect_client.call("POST", f"flow_runs/{run}/set_state", state={"type": state}, force=True)
        found[state] = run
    await settle_orphans([evaluate])
    assert prefect_client.state(found["RUNNING"]) == "CRASHED"
    assert prefect_client.state(found["CANCELLING"]) == "CANCELLED"
