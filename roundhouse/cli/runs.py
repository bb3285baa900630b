"""`roundhouse runs`: inspect a store's runs, resume them, and decide about promotions and limits."""

from __future__ import annotations

import math
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    DryRun,
    JsonOption,
    NewStoreOption,
    Overrides,
    StateOfStoreOption,
    StoreOption,
    TrustStore,
    accept_code,
    console,
    out,
    out_json,
    print_table,
    state_of,
    store_option,
)
from roundhouse.cli.prefect import at_prefect, find_prefect
from roundhouse.cli.training import close_ended_pages, links, mlflow_server, train_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundhouse.store.run import Run

app = typer.Typer(no_args_is_help=True, help="Look at the runs of a store; fork, resume and delete them.")


class Order(StrEnum):
    """Order of the runs in a list."""

    age = "age"
    run = "run"
    state = "state"
    reward = "reward"


_COLORS = {
    "running": "green",
    "failed": "red",
    "crashed": "red",
    "stopped": "yellow",
    "not started": "dim",
    "finished": "default",
}
_KEYS: dict[Order, Callable[[dict[str, Any]], Any]] = {
    Order.age: lambda facts: -facts["created_at"],
    Order.run: lambda facts: facts["run_id"],
    Order.state: lambda facts: (list(_COLORS).index(facts["state"]), -facts["created_at"]),
    Order.reward: lambda facts: -max(_rewards(facts), default=-math.inf),
}


@app.command("list")
def runs_list(
    store: StoreOption = DEFAULT_STORE,
    sort: Annotated[Order, typer.Option(help="The newest first, or by name, state or held-out reward.")] = Order.age,
    as_json: JsonOption = False,
) -> None:
    """All runs of a store, with what became of them."""
    from roundhouse.api.runs import facts_of
    from roundhouse.errors import StoreError
    from roundhouse.store.location import Location
    from roundhouse.store.run import readable_runs

    if not (runs := readable_runs(store)):
        raise StoreError(f"No run is in {Location(store).uri}.")
    run_facts = sorted(map(facts_of, runs), key=_KEYS[sort])
    if as_json:
        out_json(run_facts)
    else:
        _print_runs(run_facts)
    ended = {facts["run_id"] for facts in run_facts if facts["state"] in ("failed", "crashed", "stopped")}
    return close_ended_pages([run for run in runs if run.run_id in ended], state_of(store, None))


def _print_runs(found: list[dict[str, Any]]) -> None:
    from rich.text import Text

    rows = (
        (
            facts["run_id"],
            Text(facts["state"], style=_COLORS[facts["state"]]),
            _age(time.time() - facts["created_at"]),
            facts["environment"],
            f"{facts['iterations']}/{facts['iterations_wanted']}",
            _reward(facts["evaluation"]["before"]),
            _reward(facts["evaluation"]["after"]),
        )
        for facts in found
    )
    return print_table(("run", "state", "age", "environment", "iter.", "held-out", "→ newest"), rows)


@app.command("show")
def runs_show(run_id: str, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """One run: state, evaluations, seconds by stage, ledger, checkpoints, and the directory of its model."""
    from roundhouse.api.runs import facts_of
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    facts = facts_of(run)
    if as_json:
        return out_json(facts)
    from roundhouse.console import print_summary

    age = _age(time.time() - facts["created_at"])
    out(
        f"{run_id}: {facts['state']}, begun {age} ago, {facts['iterations']} of {facts['iterations_wanted']} iterations"
    )
    checkpoints = {"checkpoints": ", ".join(map(str, facts["checkpoints"])) or "none"}
    print_summary(console(), facts, links(run) | checkpoints, [])
    return _print_course(run, facts)


def _print_course(run: Run, facts: dict[str, Any]) -> None:
    """Print the curve of a run, its evaluations, and the error that it ended with."""
    from roundhouse.cli.reports import spark
    from roundhouse.console import mean_text
    from roundhouse.health.errors import Severity
    from roundhouse.health.heartbeat import read_beat

    rewards = [reward for reward in facts["reward_by_iteration"] if reward is not None]
    if rewards:
        curve = spark(facts["reward_by_iteration"], min(rewards), max(rewards))
        out(f"reward        {curve}  {rewards[0]:.3f} → {rewards[-1]:.3f}, at most {max(rewards):.3f}")
    if len(facts["evaluation"]["all"]) > 1:
        rows = ((each["version"], mean_text(each), f"{each['tasks'] or 0:.0f}") for each in facts["evaluation"]["all"])
        print_table(("version", "held-out reward", "tasks"), rows, right=("version", "tasks"))
    beat = None if facts["state"] == "finished" else read_beat(run.location)
    errors = [] if beat is None else [each for each in beat.errors if each.severity.rank >= Severity.ERROR.rank]
    if errors:
        newest = errors[-1]
        out(f"last error    {newest.module_name}, {newest.work_context}: {newest.message}")


@app.command("delete")
def runs_delete(
    run_id: str,
    store: StoreOption = DEFAULT_STORE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    trust_store: TrustStore = False,
) -> None:
    """Delete a run: from the store (iterations, checkpoints, replays, record), and what MLflow and Prefect show of it.

    Not while a process drives it. Forks of it keep their own checkpoints, and datasets that were collected with it stay. A
    server that does not answer keeps its records; the command names it.
    """
    from roundhouse.stages.policy import delete_replays_of, delete_run
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    accept_code(run.config, None, trust_store, "tracking")
    if not yes:
        contents = f"{len(run.checkpoint_versions())} checkpoints and its replays"
        typer.confirm(f"Delete run {run_id!r} with {contents} in {run.location.uri}?", abort=True, err=True)
    replays = delete_replays_of(run)
    delete_run(run)
    gone = f" with {len(replays)} replays ({', '.join(replays)})" if replays else ""
    out(f"{run_id}: deleted from the store{gone}")
    state = state_of(store, None)
    out(f"MLflow: {_deleted_from_mlflow(run, state)}")
    out(f"Prefect: {_deleted_from_prefect(run_id, state)}")


def _deleted_from_mlflow(run: Run, state: Path) -> str:
    from roundhouse.config.secrets import masked_text

    uri = run.config.tracking.uri or mlflow_server(state)
    if uri is None:
        return "not running; its records of the run stay. After `roundhouse up`, delete them in its page."
    from mlflow.exceptions import MlflowException

    from roundhouse.tracking.mlflow import delete_from_mlflow

    try:
        return "deleted" if delete_from_mlflow(run, uri) else "it has no records of the run"
    except MlflowException as error:
        return masked_text(f"{uri} refused ({error}); its records of the run stay. Delete them in its page.")


def _deleted_from_prefect(run_id: str, state: Path) -> str:
    if not find_prefect(state):
        return "not running; its flow runs stay. After `roundhouse up`, delete them in its page."
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    from roundhouse_flows.controls import delete

    try:
        count = delete(run_id)
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        return f"it refused ({error}); flow runs with the tag run:{run_id} stay. Delete them in its page."
    return f"{count} flow runs deleted" if count else "it has no flow runs of the run"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@app.command("resume")
def runs_resume(
    run_id: str,
    overrides: Overrides = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="Raise a limit of cost.budget first: --budget gpu_hours=10.")
    ] = None,
    comment: Annotated[str, typer.Option(help="Why the budget is raised; kept with it.")] = "",
    store: StoreOption = DEFAULT_STORE,
    here: Annotated[
        bool, typer.Option("--here", help="Train in this terminal, also where a deployment's flow run could continue.")
    ] = False,
    dry_run: DryRun = False,
    trust_store: TrustStore = False,
) -> None:
    """Continue a run after its last complete stage, even a failed one.

    A paused, failed, crashed or cancelled flow run of a deployment continues there; otherwise, and with --here or
    --set, the run trains in this terminal. The configuration is the store's, with the changes of --set.
    """
    if budget and not dry_run:
        raise_limits(store, run_id, budget, comment)
    if not (overrides or here or dry_run) and find_prefect(state_of(store, None)):
        from roundhouse_flows.controls import resume

        if (flow_run := resume(run_id)) is not None:
            out(f"{run_id}: its flow run {flow_run} continues; to train in this terminal instead, add --here")
            return
    from roundhouse.config.loading import apply_override, parse_config
    from roundhouse.store.run import load_run

    tree = load_run(store, run_id).config.model_dump(mode="json") | {"store": store, "resume": {"mode": "auto"}}
    for override in overrides or []:
        apply_override(tree, override)
    config = parse_config(tree, origin=f"run {run_id}")
    if not dry_run:
        accept_code(config, overrides, trust_store)
    train_run(config, dry_run, hints=[])


@app.command("track")
def runs_track(run_id: str, store: StoreOption = DEFAULT_STORE, trust_store: TrustStore = False) -> None:
    """Write a run's missing data to MLflow: after an outage, or to another server (MLFLOW_TRACKING_URI)."""
    from roundhouse.cli.training import track
    from roundhouse.errors import InfraError
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    accept_code(run.config, None, trust_store, "tracking")
    if not run.config.tracking.in_mlflow:
        out(f"Run {run_id} is not in MLflow: tracking.enabled is false, or tracking.sinks does not name it.")
    elif track(run):
        out(f"MLflow has all of run {run_id}.")
    else:
        raise InfraError(f"MLflow lacks a part of run {run_id}. Is the server up? See `roundhouse doctor`.")


@app.command("pause")
def runs_pause(run_id: str, store: NewStoreOption = DEFAULT_STORE, state: StateOfStoreOption = None) -> None:
    """Let a run that a deployment started stop at the next border of a stage."""
    at_prefect(state_of(store, state))
    from roundhouse_flows.controls import pause

    out(f"{run_id}: flow run {pause(run_id)} pauses before its next stage. Continue: roundhouse runs resume {run_id}")


@app.command("cancel")
def runs_cancel(run_id: str, store: NewStoreOption = DEFAULT_STORE, state: StateOfStoreOption = None) -> None:
    """End all processes of a run that a deployment started; it stays resumable."""
    at_prefect(state_of(store, state))
    from roundhouse_flows.controls import cancel

    out(f"{run_id}: flow run {cancel(run_id)} is being cancelled. Continue: roundhouse runs resume {run_id}")


@app.command("fork")
def runs_fork(
    run_id: Annotated[str, typer.Argument(help="The parent.")],
    new: Annotated[str, typer.Option("--run-id", help="Id of the new run.")],
    at: Annotated[int | None, typer.Option(help="Iteration to continue from. Default: the newest.", min=0)] = None,
    overrides: Overrides = None,
    store: StoreOption = DEFAULT_STORE,
    train: Annotated[bool, typer.Option("--train", help="Train it right away.")] = False,
    dry_run: DryRun = False,
    trust_store: TrustStore = False,
) -> None:
    """A new run from an iteration of another: weights, trainer state, and configuration but for what --set changes."""
    from roundhouse.stages.fork import fork_config, fork_run

    config = fork_config(store, run_id, new, at, overrides or [])
    if dry_run:
        train_run(config, dry_run, hints=[])
        return
    if train:
        accept_code(config, overrides, trust_store)
    fork = fork_run(config)
    assert fork.parent is not None, "a fork has one"
    out(
        f"{new} continues {run_id} from version {fork.parent.version}; its next iteration is {fork.parent.version + 1}."
    )
    if train:
        train_run(config, dry_run, hints=[])
    else:
        out(f"Train it: roundhouse runs resume {new}{store_option(store)}")


@app.command("export-model")
def runs_export_model(
    run_id: str,
    version: Annotated[
        str | None, typer.Argument(help="Policy version, newest or promoted; the newest when left out.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory that is to be made.")] = Path("model"),
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as trained when left out.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="The whole model, also of a run that trains an adapter (train.lora).")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write a policy version as a Hugging Face directory with a model card, for transformers, vLLM or PEFT."""
    from roundhouse.api.runs import open_run

    checkpoint = open_run(run_id, store).checkpoint(version)
    out(f"version {checkpoint.version} of {run_id}: {checkpoint.export(output, dtype, merge=merge)}")


def _reward(evaluation: dict[str, Any] | None) -> str:
    from roundhouse.console import mean_text

    return "–" if evaluation is None else mean_text(evaluation)


def _rewards(facts: dict[str, Any]) -> list[float]:
    return [each["reward_mean"] for each in facts["evaluation"]["all"] if each["reward_mean"] is not None]


@app.command("approve")
def runs_approve(
    run_id: str,
    version: Annotated[
        int | None, typer.Argument(help="Policy version. Default: list the versions that wait.", min=0)
    ] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Do not promote it.")] = False,
    comment: Annotated[str, typer.Option(help="Why; kept with the answer.")] = "",
    store: StoreOption = DEFAULT_STORE,
    state: StateOfStoreOption = None,
    trust_store: TrustStore = False,
) -> None:
    """Approve the promotion of a version, or refuse it. The first answer counts."""
    from roundhouse.stages.promotion import answer
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    if version is None:
        from roundhouse.stages.promotion import open_questions

        rows = []
        for question in open_questions(run):
            until = "" if question.until is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(question.until))
            then = "" if question.until is None else question.at_limit
            rows.append((question.version, question.why, until, then))
        if not rows:
            return out(f"No version of {run.run_id} waits for approval.")
        return print_table(("version", "why", "until", "then"), rows)
    accept_code(run.config, None, trust_store, "tracking")
    decision = answer(run, version, not refuse, comment)
    if find_prefect(state_of(store, state)):
        from roundhouse_flows.approval import carry_out

        carry_out(run, version, decision)
    else:
        from roundhouse.tracking.mlflow import tell_mlflow

        tell_mlflow(run, version)
    return out(f"{run_id}: version {version} was {decision}")


def raise_limits(store: str, run_id: str, wanted: Sequence[str], comment: str) -> None:
    """Record `--budget name=value` in the store.

    Raises:
        ConfigError: not of that form, no such limit, or no raise.
    """
    import getpass

    from roundhouse.errors import ConfigError
    from roundhouse.stages.cost import raise_budget
    from roundhouse.store.run import load_run

    limits = {}
    for text in wanted:
        name, _, value = text.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--budget {text!r} is not of the form limit=number, such as gpu_hours=10.") from None
    raised = raise_budget(load_run(store, run_id), limits, comment, getpass.getuser())
    out(f"{run_id}: budget raised to {', '.join(f'{name}={value:g}' for name, value in raised.limits.items())}")
