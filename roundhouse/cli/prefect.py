"""`roundhouse deploy | schedule | alerts`: objects of a Prefect server, and which server a command talks to.

Invariant: `find_prefect` and `at_prefect` are called before Prefect is imported, since its client reads its settings then.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import (
    DEFAULT_STATE,
    DEFAULT_STORE,
    JsonOption,
    StateOfStoreOption,
    StateOption,
    StoreOption,
    TrustStore,
    accept_code,
    out,
    out_json,
    print_table,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_prefect(state: Path) -> bool:
    """Let Prefect's client find the server of this state directory, else the one of PREFECT_API_URL; return whether
    one exists."""
    from roundhouse.infra import services

    running = services.status(state / "services")
    if running.is_ready("prefect"):
        os.environ.update(running.environment())
        return True
    return "PREFECT_API_URL" in os.environ


def at_prefect(state: Path) -> None:
    """Let Prefect's client find a server, which is required.

    Raises:
        InfraError: no server is known; names the start command.
    """
    from roundhouse.errors import InfraError

    if not find_prefect(state):
        raise InfraError(
            f"No Prefect server runs in {state / 'services'}, and PREFECT_API_URL is not set. Start it with `roundhouse up`."
        )


app = typer.Typer()

TEMPLATE = Path("k8s/components/work-pool/base-job-template.yaml")
PRESETS = Path("k8s/components/work-pool/presets")


@app.command("deploy")
def deploy_command(
    file: Annotated[Path, typer.Argument(help="Deployments, in Prefect's format.")] = Path("prefect.yaml"),
    template: Annotated[Path, typer.Option(help="The work pool's base job template.")] = TEMPLATE,
    presets: Annotated[
        Path, typer.Option(help="Presets that the form of `train` offers; those in the pods.")
    ] = PRESETS,
    namespace: Annotated[
        str | None, typer.Option(help="Namespace of the flow runs' Jobs; the template's default when left out.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the changes.")] = False,
    as_json: JsonOption = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Register the flows on the Kubernetes work pool: the pool, its job template, deployments, schedules."""
    from roundhouse.config.deployments import read_deployments, read_template
    from roundhouse.config.secrets import masked_text
    from roundhouse.errors import ConfigError
    from roundhouse.shipped import shipped
    from roundhouse_flows.forms import PRESETS_VARIABLE, preset_names

    os.environ[PRESETS_VARIABLE] = str(shipped(presets))
    if not preset_names():
        raise ConfigError(
            f"--presets {presets}: it has no run configurations for the form of `train`. Name a folder with YAML files."
        )
    pool = read_template(shipped(template))
    if namespace is not None:
        pool = pool.in_namespace(namespace)
    deployments = read_deployments(shipped(file), pool)
    if "PREFECT_API_URL" not in os.environ:  # a server that is named counts, also while `roundhouse up` runs here
        at_prefect(state)
    import roundhouse_flows._prefect.tuning  # noqa: F401 - before all else of Prefect
    from roundhouse_flows.work_pool import deploy

    server = masked_text(os.environ["PREFECT_API_URL"])
    if not as_json:
        out(f"Prefect server: {server}")
    lines = []
    for line in deploy(deployments, pool, dry_run=dry_run):
        lines.append(line)
        if not as_json:
            out(line)
    if as_json:
        out_json({"server": server, "dry_run": dry_run, "done": lines})
    elif dry_run:
        out("nothing was changed (--dry-run)")


schedule_app = typer.Typer(no_args_is_help=True, help="Collect rollouts on a schedule.")
NameArgument = Annotated[str, typer.Argument(help="The dataset's name.")]


@schedule_app.command("collect")
def schedule_collect(
    cron: Annotated[str, typer.Option(help="When: five fields, such as '0 2 * * *' for 02:00 every night.")],
    name: Annotated[str, typer.Option(help="Name of the dataset.")],
    run: Annotated[str, typer.Option(help="Run; its checkpoint plays.")],
    version: Annotated[int | None, typer.Option(help="Policy version; the newest when left out.", min=0)] = None,
    promoted: Annotated[
        bool, typer.Option("--promoted", help="With the checkpoint that is promoted at that moment.")
    ] = False,
    keep_last: Annotated[
        int | None, typer.Option(help="Versions of the dataset to keep; all when left out.", min=1)
    ] = None,
    keep_days: Annotated[float | None, typer.Option(help="Days for which a version is kept at least.")] = None,
    timezone: Annotated[str, typer.Option(help="Time zone: UTC, Europe/Berlin, …")] = "UTC",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the run's configuration.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    state: StateOfStoreOption = None,
    trust_store: TrustStore = False,
) -> None:
    """Collect rollouts of a run's checkpoint by a cron expression into datasets/<name>/<moment>."""
    from pydantic import ValidationError

    from roundhouse.config.yaml_text import in_words
    from roundhouse.errors import ConfigError
    from roundhouse.infra.consents import record_consent
    from roundhouse.store.location import Location
    from roundhouse_flows.forms import CollectForm

    values = {
        "version": version,
        "checkpoint": "promoted" if promoted else "newest",
        "keep_last": keep_last,
        "keep_days": keep_days,
        "overrides": overrides or [],
    }
    try:
        form = CollectForm.model_validate({"run_id": run, "store": Location(store).uri, "name": name} | values)
    except ValidationError as error:
        first = error.errors()[0]
        named = f"--{first['loc'][0]} {first['input']!r}: " if first["loc"] else ""
        mismatch = first["type"] == "string_pattern_mismatch"
        raise ConfigError(
            f"{named}{'must be ' + in_words(first['ctx']['pattern']) if mismatch else first['msg']}"
        ) from None
    config = form.resolve()  # an unknown run or override is reported now, not at two in the morning
    accept_code(config, overrides, trust_store)
    services = state_of(store, state)
    record_consent(config, state=services)
    at_prefect(services)
    from roundhouse_flows.schedules import add_schedule

    schedule = add_schedule(form, cron, timezone)
    out(f"{name}: {cron} ({timezone}), next at {_moment(schedule.next_moment)}")


@schedule_app.command("list")
def schedule_list(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """All schedules."""
    at_prefect(state)
    from roundhouse_flows.schedules import schedules

    schedules_found = [
        {
            "name": each.name,
            "run": each.form.run_id,
            "store": each.form.store,
            "version": each.form.checkpoint if each.form.version is None else each.form.version,
            "cron": each.cron,
            "timezone": each.timezone,
            "next": _moment(each.next_moment),
            "keep_last": "all" if each.form.keep_last is None else each.form.keep_last,
            "keep_days": each.form.keep_days,
            "active": each.active,
        }
        for each in schedules()
    ]
    if as_json:
        return out_json(schedules_found)
    fields = ("name", "run", "version", "cron", "timezone", "next", "keep_last")
    columns = ("dataset", "run", "version", "cron", "time zone", "next", "keeps")
    return print_table(columns, ([facts[name] for name in fields] for facts in schedules_found))


@schedule_app.command("remove")
def schedule_remove(name: NameArgument, state: StateOption = DEFAULT_STATE) -> None:
    """Stop collecting into a dataset; its versions stay."""
    at_prefect(state)
    from roundhouse_flows.schedules import remove_schedule

    remove_schedule(name)
    out(f"{name}: no longer scheduled")


@schedule_app.command("backfill")
def schedule_backfill(
    name: NameArgument,
    since: Annotated[datetime, typer.Option(help="From this day (UTC) on.", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M"])],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the moments.")] = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Collect the moments of a schedule that were missed: the machine was off, or the collection failed."""
    at_prefect(state)
    from roundhouse_flows.schedules import back_fill, missed

    moments = missed(name, since.replace(tzinfo=UTC))
    for moment in moments:
        out(_moment(moment))
    if not dry_run:
        back_fill(name, moments)
    out(f"{name}: {len(moments)} {'missed' if dry_run else 'asked for'}")


def _moment(moment: datetime | None) -> str:
    return "never" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


alerts_app = typer.Typer(
    no_args_is_help=True, help="Send a message when a run fails, stalls, collapses or has used its budget."
)


@alerts_app.command("install")
def alerts_install(
    webhook: Annotated[
        str | None,
        typer.Option(
            help="URL that alerts are sent to as JSON, with a `text` as Slack wants it.",
            envvar="ROUNDHOUSE_ALERTS_WEBHOOK",
        ),
    ] = None,
    suspend: Annotated[
        list[str] | None,
        typer.Option(
            help="An alert on which the run is suspended too: reward_collapse, kl, mismatch, reward_hacking, uneven_failures. "
            "May be repeated."
        ),
    ] = None,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Create the automations on a Prefect server, or change their actions; a person's additions stay."""
    at_prefect(state)
    from roundhouse_flows.alerts import install

    _show(install(webhook, suspend or []))


@alerts_app.command("list")
def alerts_list(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """The automations that there are, and what each does."""
    at_prefect(state)
    from roundhouse_flows.alerts import installed

    automations = installed()
    if as_json:
        out_json([_automation_facts(each) for each in automations])
    else:
        _show(automations)


@alerts_app.command("remove")
def alerts_remove(state: StateOption = DEFAULT_STATE) -> None:
    """Delete the automations. To silence one for a time, switch it off in Prefect's page."""
    at_prefect(state)
    from roundhouse_flows.alerts import remove

    out(f"removed: {', '.join(remove()) or 'nothing'}")


def _show(automations: Sequence[Any]) -> None:
    if not automations:
        return out("No alerts are installed: roundhouse alerts install")
    facts = map(_automation_facts, automations)
    rows = ((each["name"], "yes" if each["enabled"] else "no", ", ".join(each["actions"])) for each in facts)
    return print_table(("alert", "on", "does"), rows)


def _automation_facts(automation: Any) -> dict[str, Any]:
    from roundhouse_flows.alerts import PREFIX

    facts = {
        "do-nothing": "shows it in Prefect's event feed",
        "call-webhook": "calls the webhook",
        "suspend-flow-run": "suspends the run",
    }
    actions = [facts.get(action.type, action.type) for action in automation.actions]
    return {"name": automation.name.removeprefix(PREFIX), "enabled": automation.enabled, "actions": actions}
