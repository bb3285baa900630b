"""A person's approval of a promotion, through Prefect: each open question has a suspended flow run with a form.

Invariant: the store holds the question and its answer (`roundhouse.stages.promotion`); Prefect shows them with a form.
A question gets one flow run however often it is asked, and a second one planned for the end of the time limit. The
question does not depend on a Prefect server: `roundhouse runs approve` answers it as well.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.states import Cancelled, Scheduled
from pydantic import Field

from roundhouse.stages.promotion import (
    ApprovalDecision,
    PromotionQuestion,
    answer,
    answer_to,
    open_questions,
    settle_expired,
)
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.tracking.mlflow import tell_mlflow
from roundhouse_flows._prefect.suspension import PAUSE_SECONDS
from roundhouse_flows.controls import let_go_on
from roundhouse_flows.forms import ApproveForm
from roundhouse_tasks.report import opened_tracker

log = logging.getLogger(__name__)

DEPLOYMENT = "approve/approve"
WAITS = "approval-"
"""Begins the pause key of a training run that waits for an answer."""


class Approval(RunInput):
    """The form of a question."""

    decision: Literal["approve", "refuse"]
    comment: str = Field(default="", description="Why; it is kept with the answer.")
    name: str = Field(default="", description="Name of the person who decides.")


def put_to_prefect(run: Run, question: PromotionQuestion) -> bool:
    """Let the question stand in Prefect; whether it does."""
    settings = {"run_id": run.run_id, "store": Location(run.config.store).uri, "version": question.version}
    key = f"{run.uid}-{question.version}"
    try:
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name(DEPLOYMENT).id
            options: dict[str, Any] = {"tags": [_tag(run, question.version)]}
            client.create_flow_run_from_deployment(
                deployment,
                parameters={"settings": settings},
                name=f"approve? version {question.version} of {run.run_id}",
                idempotency_key=f"ask-{key}",
                **options,
            )
            if question.until is not None:
                moment = datetime.fromtimestamp(question.until, UTC)
                client.create_flow_run_from_deployment(
                    deployment,
                    parameters={"settings": settings | {"decision": "on_timeout"}},
                    state=Scheduled(scheduled_time=moment),
                    name=f"time limit of version {question.version} of {run.run_id}",
                    idempotency_key=f"limit-{key}",
                    **options,
                )
        return True
    except ObjectNotFound:
        return False
    except (PrefectHTTPStatusError, httpx.HTTPError) as error:
        log.warning("the question about version %d could not be put to Prefect: %s", question.version, error)
        return False


def decide(run: Run, form: ApproveForm) -> dict[str, Any]:
    """The body of the `approve` flow: take the answer from the form, or wait for one; then carry it out."""
    version = form.version
    decision = answer_to(run, version)
    if decision is None and form.decision == "on_timeout":
        waiting = [question for question in open_questions(run) if question.version == version]
        decision = settle_expired(run, waiting[0], datetime.now(UTC).timestamp()) if waiting else None
    elif decision is None and form.decision is not None:
        decision = answer(run, version, form.decision == "approve", form.comment, by="a person in Prefect")
    elif decision is None:
        decision = _asked(run, version)
    if decision is None:
        return {"version": version, "answer": None}
    carry_out(run, version, decision)
    return {"version": version, "answer": decision.model_dump(mode="json")}


def carry_out(run: Run, version: int, given: ApprovalDecision) -> None:
    """Update the flow runs that show the answer or wait for it."""
    if (tracker := opened_tracker(run)) is not None:
        tracker.follow_store()
    else:
        tell_mlflow(run, version)
    try:
        with get_client(sync_client=True) as client:
            waiting = {  # they show the question, which is settled
                "tags": {"all_": [_tag(run, version)]},
                "state": {"type": {"any_": [StateType.PAUSED.value, StateType.SCHEDULED.value]}},
            }
            for other in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting)):
                client.set_flow_run_state(other.id, Cancelled(message=f"Version {version} was {given}"), force=True)
            if not open_questions(run):
                let_go_on(client, run.run_id, WAITS)
    except (PrefectHTTPStatusError, httpx.HTTPError, ObjectNotFound) as error:
        log.warning("Prefect did not receive the answer about version %d: %s", version, error)


def _asked(run: Run, version: int) -> ApprovalDecision:
    """Return a person's answer, for which this flow run waits without a process."""
    [question] = [each for each in open_questions(run) if each.version == version]
    until = "" if question.until is None else f" until {datetime.fromtimestamp(question.until, UTC):%Y-%m-%d %H:%M} UTC"
    description = (
        f"**Promote version {version} of run {run.run_id}?**\n\n{question.why}.\n\nThe question stands{until}; then: "
        f"{question.at_limit}."
    )
    form = Approval.with_initial_data(description=description)
    form_answer = suspend_flow_run(wait_for_input=form, key="decision", timeout=PAUSE_SECONDS)
    return answer(
        run,
        version,
        form_answer.decision == "approve",
        form_answer.comment,
        by=form_answer.name or "a person in Prefect",
    )


def _tag(run: Run, version: int) -> str:
    return f"approval:{run.uid}-{version}"
