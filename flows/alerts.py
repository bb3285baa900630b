"""Alerts as Prefect automations, shipped ready: events and actions.

Invariant: our automations are identified by name. Installing again keeps a person's additions (an e-mail, a Slack
message) and whether it is enabled, and `roundhouse up` does not restore deleted ones.

Without any account, each alert is in the run's record (`roundhouse runs status`), in MLflow and in Prefect's event
feed; with `--webhook`, it is sent to that URL as JSON; with `--suspend`, the run waits for a person.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import CallWebhook, DoNothing, SuspendFlowRun
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import PrefectHTTPStatusError
from prefect.variables import Variable

from roundhouse.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "roundhouse: "
BLOCK = "roundhouse-alerts"
INSTALLED = "roundhouse_alerts"
"""Variable of the server: which automations were installed there, and are not brought back."""
WEBHOOK_VARIABLE = "ROUNDHOUSE_ALERTS_WEBHOOK"
FLOWS = ["train", "train-offline", "fork", "collect", "evaluate"]
OURS = (CallWebhook, DoNothing, SuspendFlowRun)
"""Actions that installing sets; all others are a person's."""


@dataclass(frozen=True)
class AlertKind:
    """Something that an automation watches for."""

    name: str
    events: tuple[str, ...]
    about: str
    can_suspend: bool = False
    """Whether the flow run itself emits its event between two iterations."""

    @property
    def automation(self) -> str:
        return PREFIX + self.name.replace("_", " ")

    @property
    def trigger(self) -> EventTrigger:
        failed = self.name == "failed_run"
        return EventTrigger(
            expect=set(self.events),
            match={"prefect.resource.id": "prefect.flow-run.*" if failed else "roundhouse.run.*"},
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": FLOWS} if failed else {},
            posture=Posture.Reactive,
            threshold=1,
        )


ALERTS = (
    AlertKind("failed_run", ("prefect.flow-run.Failed", "prefect.flow-run.Crashed"), "A flow run failed or crashed."),
    AlertKind("stall", ("roundhouse.failure.stalled",), "A stage made no progress. It was stopped and is retried."),
    AlertKind("reward_collapse", ("roundhouse.alert.reward_collapse",), "The reward fell far below its best.", True),
    AlertKind("kl", ("roundhouse.alert.kl",), "The policy is far from its reference.", True),
    AlertKind("mismatch", ("roundhouse.alert.mismatch",), "Engine and trainer disagree about probabilities.", True),
    AlertKind(
        "reward_hacking", ("roundhouse.alert.reward_hacking",), "The audit refuses rollouts that were rewarded.", True
    ),
    AlertKind(
        "uneven_failures",
        ("roundhouse.alert.uneven_failures",),
        "Rollouts fail by what they do: the others are a biased sample.",
        True,
    ),
    AlertKind("budget_reached", ("roundhouse.alert.budget_reached",), "The budget is used up; the run waits or ends."),
    AlertKind("approval_wanted", ("roundhouse.alert.approval_wanted",), "A promotion waits for a person."),
)
"""The thresholds are the run's: section `alerts` of its configuration."""

_PAYLOAD = """{% set said = event.payload.message or (event.payload.validated_state or {}).message or event.event %}{
 "text": {{ ("Roundhouse, " ~ event.resource.name ~ ": " ~ said) | tojson }},
 "alert": "%(alert)s",
 "run": {{ event.resource.name | tojson }},
 "event": {{ event.event | tojson }},
 "message": {{ said | tojson }},
 "occurred": {{ event.occurred | string | tojson }}
}"""


def install(webhook: str | None = None, suspend: Collection[str] = ()) -> list[Automation]:
    """Create missing automations, set these actions for all of them, and return them.

    Args:
        webhook: URL that receives alerts from now on; None keeps an earlier one.
        suspend: alerts that also suspend the run.

    Raises:
        ConfigError: an unknown alert, or an alert that cannot suspend a run.
    """
    able = [kind.name for kind in ALERTS if kind.can_suspend]
    if unknown := set(suspend) - set(able):
        raise ConfigError(f"--suspend {', '.join(sorted(unknown))}: a run can be suspended on {', '.join(able)}.")
    block = _block(webhook)
    with get_client(sync_client=True) as client:
        present_by_name = {automation.name: automation for automation in _read(client)}
        for kind in ALERTS:
            actions = _actions(kind, block, kind.name in suspend)
            if (present := present_by_name.get(kind.automation)) is None:
                client.create_automation(
                    AutomationCore(name=kind.automation, description=kind.about, trigger=kind.trigger, actions=actions)
                )
            else:
                others = [action for action in present.actions if not isinstance(action, OURS)]
                ours = [action for action in actions if not (others and isinstance(action, DoNothing))]
                body = present.model_dump(mode="json", include={"name", "description", "enabled", "tags"}) | {
                    "trigger": kind.trigger.model_dump(mode="json"),
                    "actions": [action.model_dump(mode="json") for action in [*ours, *others]],
                }
                # Prefect's own method omits values that equal a default, including the kinds of trigger and action,
                # which are then refused
                client._client.put(f"/automations/{present.id}", json=body).raise_for_status()
        automation = _read(client)
    Variable.set(INSTALLED, [kind.automation for kind in ALERTS], overwrite=True)
    return automation


def install_once() -> None:
    """Install on a server that has never had them; a webhook that the environment names is set each time."""
    webhook = os.environ.get(WEBHOOK_VARIABLE)
    try:
        known: Any = Variable.get(INSTALLED, default=[])
        if webhook is not None or {kind.automation for kind in ALERTS} - set(known):
            install(webhook)
    except (PrefectHTTPStatusError, httpx.HTTPError) as error:
        log.warning("the alerts are not installed (%s); `roundhouse alerts install` tries again", error)


def installed() -> list[Automation]:
    """Our automations on this server."""
    with get_client(sync_client=True) as client:
        return _read(client)


def remove() -> list[str]:
    """Delete our automations, with all additions, and return their names."""
    with get_client(sync_client=True) as client:
        automations = _read(client)
        for automation in automations:
            client.delete_automation(automation.id)
    return [automation.name for automation in automations]


def _read(client: SyncPrefectClient) -> list[Automation]:
    names = [kind.automation for kind in ALERTS]
    automations = [each for each in client.read_automations() if each.name in names]
    return sorted(automations, key=lambda each: names.index(each.name))


def _actions(kind: AlertKind, block: Any, suspend: bool) -> list[Any]:
    actions: list[Any] = []
    if block is not None:
        actions.append(CallWebhook(block_document_id=block, payload=_PAYLOAD.replace("%(alert)s", kind.name)))
    if suspend:
        actions.append(SuspendFlowRun())
    return actions or [DoNothing()]


def _block(webhook: str | None) -> Any | None:
    """Return the block that sends to this URL, or without one the earlier block; None if no webhook was ever given."""
    if webhook is None:
        with suppress(ValueError):
            return Webhook.load(BLOCK)._block_document_id  # type: ignore[union-attr]
        return None
    if not webhook.startswith(("http://", "https://")):
        raise ConfigError(f"--webhook {webhook!r} is not an http:// or https:// URL.")
    headers: Any = {"Content-Type": "application/json"}
    return Webhook(url=webhook, headers=headers).save(BLOCK, overwrite=True)  # type: ignore[arg-type]
