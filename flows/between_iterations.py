"""Work between two iterations: handle a suspension, raise alerts, request approval, check the budget.

Invariant: no part of an iteration is in flight here, so a run may wait or be suspended without losing work. The reason
for waiting is stored; a run that is killed while it waits, and started again, waits for the same.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field, create_model

from roundhouse.activity import announce
from roundhouse.errors import ConfigError
from roundhouse.health.errors import Alert, Severity
from roundhouse.stages.cost import budget_of, budget_reached, raise_budget, raises, used_up
from roundhouse.stages.promotion import PromotionQuestion, open_questions, settle_expired
from roundhouse.stages.report import AlertWatch
from roundhouse.store.run import Run
from roundhouse_flows._prefect.suspension import PAUSE_SECONDS, heed_suspension, is_deployed
from roundhouse_flows.approval import WAITS, carry_out, put_to_prefect
from roundhouse_tasks.health import tell

POLL_SECONDS = 2.0
"""Interval at which a run that waits in a terminal checks for the answer."""

_watches: dict[str, AlertWatch] = {}
_asked: set[tuple[str, int]] = set()
"""Questions that this process has put, by run uid and version."""


def before_iteration(run: Run, k: int) -> None:
    """Before iteration k: pause if a person asked for it, raise alerts from the last numbers, request decisions, and
    stop at an exhausted budget.

    Raises:
        Pause: the flow run was suspended.
        BudgetReached: a limit is used up, and this run cannot wait for a person.
    """
    heed_suspension()
    _tell_alerts(run, k - 1)
    _ask_for_approval(run, k)
    _stay_within_budget(run, k)


def after_last_iteration(run: Run) -> None:
    """Raise the last alerts and put the last questions."""
    _tell_alerts(run, run.config.iterations)
    _open_after_settling(run)


def _tell_alerts(run: Run, iteration: int) -> None:
    watch = _watches.setdefault(run.uid, AlertWatch(run))
    for alert in watch.look(iteration):
        tell(run, alert, f"iteration {iteration}")


def _ask_for_approval(run: Run, k: int) -> None:
    waiting = _open_after_settling(run)
    if not waiting or run.config.evaluation.approval.while_pending == "continue":
        return
    versions = "-".join(str(question.version) for question in waiting)
    announce("waiting", text=f"version {versions} waits for approval: roundhouse runs approve {run.run_id} {versions}")
    if is_deployed():
        suspend_flow_run(
            key=f"{WAITS}{versions}-{k}", timeout=PAUSE_SECONDS
        )  # Resume without an answer: continue for now
        return
    while _open_after_settling(run):
        time.sleep(POLL_SECONDS)


def _open_after_settling(run: Run) -> list[PromotionQuestion]:
    """Ask all open questions, once each, answer expired ones, and return those still open."""
    if not run.config.evaluation.approval.required:
        return []
    still_open = []
    for question in open_questions(run):
        if (answer := settle_expired(run, question, time.time())) is not None:
            carry_out(run, question.version, answer)
            continue
        still_open.append(question)
        if (run.uid, question.version) not in _asked:
            _asked.add((run.uid, question.version))
            put_to_prefect(run, question)
            text = f"Version {question.version} waits for a person's approval: {question.why}."
            tell(run, Alert("approval_wanted", text), f"version {question.version}", Severity.INFO)
    return still_open


def _stay_within_budget(run: Run, k: int) -> None:
    note = ""
    for number in itertools.count():
        lines = used_up(run, k)
        if not lines:
            return
        raised = len(raises(run))
        if number == 0:
            text = f"The budget is used up before iteration {k}: {'; '.join(lines)}."
            tell(run, Alert("budget_reached", text), f"iteration {k}")
        if run.config.cost.on_reached == "stop" or not is_deployed():
            raise budget_reached(run, k, lines)
        form = _budget_form(run, k, lines, note)
        answer = suspend_flow_run(wait_for_input=form, key=f"budget-{k}-{raised}-{number}", timeout=PAUSE_SECONDS)
        values: dict[str, Any] = answer.model_dump()
        more = {name: values[name] for name, limit in budget_of(run).items() if values[name] > limit}
        note = "" if more else "The last answer raised nothing.\n\n"
        try:
            if more:
                raise_budget(run, more, values["comment"], values["name"] or "a person in Prefect")
        except ConfigError as error:
            note = f"{error}\n\n"


def _budget_form(run: Run, k: int, lines: list[str], note: str) -> type[RunInput]:
    fields: dict[str, Any] = {
        name: (float, Field(default=limit, description=f"cost.budget.{name}; more than {limit:g} raises it."))
        for name, limit in budget_of(run).items()
    }
    fields["comment"] = (str, Field(default="", description="Why; it is kept with the raise."))
    fields["name"] = (str, Field(default="", description="Name of the person who raises it."))
    form = create_model("RaiseBudget", __base__=RunInput, **fields)
    used = "\n".join(f"- {line}" for line in lines)
    text = (
        f"**Run {run.run_id} is paused before iteration {k}.**\n\n{used}\n\n{note}Raise the used-up limits to resume."
    )
    return form.with_initial_data(description=text)
