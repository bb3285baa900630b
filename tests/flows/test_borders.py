"""A flow run that Prefect did not notify of its suspension notices it between two iterations."""

from __future__ import annotations

from typing import NoReturn

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.states import Suspended

from roundhouse_flows._prefect import suspension
from roundhouse_flows._prefect.suspension import heed_suspension
from tests.flows.served import Served

pytestmark = pytest.mark.real


@pytest.mark.smoke("Prefect")
def test_a_suspended_flow_run_rests_at_the_border_whoever_has_told_it(
    prefect_client: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspension, "is_deployed", lambda: True)
    passed = []

    @flow(name="rests")
    def rests() -> None:
        heed_suspension()
        passed.append("at work")
        context = FlowRunContext.get()
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(context.flow_run.id, Suspended(timeout_seconds=3600), force=True)
        with monkeypatch.context() as away:
            away.setattr(suspension, "get_client", refused)
            heed_suspension()
        passed.append("the server is away")
        with pytest.raises(Pause):
            heed_suspension()
        assert context.flow_run_suspension_request.is_requested(), "for all that runs under it"
        heed_suspension()

    with pytest.raises(Pause):
        rests()
    assert passed == ["at work", "the server is away"]


def refused(**_: object) -> NoReturn:
    raise httpx.ConnectError("refused")
