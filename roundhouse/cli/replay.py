"""`roundhouse replay | replays | rescore | env test`: run recorded stages again; judge recorded rollouts anew."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.env_try import env_try
from roundhouse.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    Overrides,
    StoreOption,
    TrustStore,
    accept_code,
    console,
    error_console,
    figure,
    out,
    out_json,
    print_table,
    store_name,
)

if TYPE_CHECKING:
    from roundhouse.replays.bisect import Bisection
    from roundhouse.replays.comparison import Comparison
    from roundhouse.replays.verdicts import VerdictDiff

app = typer.Typer()
replays_app = typer.Typer(no_args_is_help=True, help="Replays of a store's runs: what came out of them.")

env_app = typer.Typer(no_args_is_help=True, help="Environments, tried and tested.")

DIFFERS = 1
"""Exit code if a replay without substitutions differs, or if an environment fails its test."""
METRICS_SHOWN, ROWS_SHOWN, FLIPS_SHOWN = 6, 20, 10

JudgedRun = Annotated[str | None, typer.Argument(metavar="RUN", help="Run; its rollouts are judged.")]
JudgedDatasets = Annotated[
    list[str] | None,
    typer.Option("--dataset", help="Instead of a run: nightly, nightly@all, nightly@<version>; may be repeated."),
]
JudgedIterations = Annotated[
    str | None, typer.Option("--iterations", help="first:last or one; left out: all that collected.")
]
ReplayedStages = Annotated[
    list[str] | None,
    typer.Option(help="collect, validate, train or evaluate; may be repeated. Left out: validate and train."),
]
ReplayInputs = Annotated[
    list[str] | None,
    typer.Option("--input", help="rollouts=<re-scored dataset | path | iteration:7>, base=<version>."),
]
ReplayName = Annotated[str, typer.Argument(metavar="NAME", help="A replay.")]


def progress(line: str) -> None:
    """Report progress on stderr; stdout has the result."""
    error_console().print(f"[dim]{line}[/]", highlight=False)


def span_of(text: str) -> range:
    """`10:20` (both included) or `12`.

    Raises:
        typer.BadParameter: it is neither.
    """
    first, colon, last = text.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise typer.BadParameter(
            f"{text!r} is not a span of iterations. Give first:last, such as 10:20, or one number."
        )
    return range(int(first), int(last if colon else first) + 1)


@app.command("replay")
def replay_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run; its stages run again.")],
    iterations: Annotated[str, typer.Option(help="first:last, such as 10:20, or one iteration.")],
    stage: ReplayedStages = None,
    overrides: Overrides = None,
    inputs: ReplayInputs = None,
    name: Annotated[
        str | None, typer.Option(help="Of the replay; left out, it follows from the rest.", callback=store_name)
    ] = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option("--gate", help="A bound of the drift gate, such as max_kl=0.2; may be repeated."),
    ] = None,
    gated: Annotated[
        bool, typer.Option("--drift-gate/--no-drift-gate", help="Stop when the data no longer fits the policy.")
    ] = True,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Run recorded stages again, with or without substitutions, and compare them with the original.

    The replay is in replays/<name> of the store; the run is only read. The same command resumes it. Exits with 1 if a
    replay without substitutions differs, with 65 if the drift gate stopped it.
    """
    from roundhouse.errors import DataError
    from roundhouse.infra.services import services_of
    from roundhouse.replays import replay
    from roundhouse.replays.comparison import DriftGate
    from roundhouse.replays.stages import SAMPLING, substituted_config
    from roundhouse.store.run import load_run

    gate = DriftGate.parse(bounds or []) if gated or bounds else None
    substituted = dict(each.partition("=")[::2] for each in inputs or [])
    if not all(substituted.values()):
        raise typer.BadParameter("--input takes name=value, such as rollouts=mended.")
    config = substituted_config(load_run(store, run_id).config, overrides or [])
    accept_code(config, overrides, trust_store)
    stages = stage or ["validate", "train"]
    with services_of(config) if set(stages) & set(SAMPLING) else nullcontext():
        comparison = replay(
            store,
            run_id,
            span_of(iterations),
            stages,
            overrides=overrides or [],
            inputs=substituted,
            name=name,
            gate=gate,
            say=progress,
        )
    out_json(comparison.as_json()) if as_json else _show(comparison)
    if comparison.stopped is not None:
        raise DataError(
            f"Stopped at iteration {comparison.stopped['iteration']}, because its recorded rollouts no longer fit the policy: "
            f"{'; '.join(comparison.stopped['reasons'])}. The versions before it are in {comparison.uri}. Raise the bound with "
            "--gate, or collect again from there."
        )
    if not comparison.equal and not comparison.substituted:
        raise typer.Exit(DIFFERS)


@replays_app.command("list")
def replays_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """All replays of a store."""
    from roundhouse.errors import StoreError
    from roundhouse.replays.stages import load_replay, read_comparison, replay_names, request_of

    replays: list[dict[str, Any]] = []
    for name in replay_names(store):
        request = request_of(load_replay(store, name))
        try:
            comparison = read_comparison(store, name)
        except StoreError:
            outcome = "interrupted"
        else:
            stopped, first = comparison["stopped"], comparison["first"]
            outcome = "equal" if first is None else f"differs from iteration {first['iteration']}, {first['stage']}"
            if stopped is not None:
                outcome = f"stopped by drift at {stopped['iteration']}"
        replays.append({"name": name, "request": request, "outcome": outcome})
    if as_json:
        return out_json(replays)
    rows = []
    for each in replays:
        request = each["request"]
        substituted = [*request["set"], *(f"{key}={value}" for key, value in request["inputs"].items())]
        span, stages = ":".join(map(str, request["iterations"])), ", ".join(request["stages"])
        rows.append(
            (each["name"], request["run_id"], span, stages, ", ".join(substituted) or "nothing", each["outcome"])
        )
    return print_table(("replay", "run", "iterations", "stages", "substituted", "outcome"), rows)


@replays_app.command("show")
def replays_show(
    name: ReplayName,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """The comparison of a replay with its original, as JSON."""
    from roundhouse.replays.stages import read_comparison

    out_json(read_comparison(store, name))


@replays_app.command("delete")
def replays_delete(
    name: ReplayName,
    store: StoreOption = DEFAULT_STORE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a replay with its checkpoints; the run stays as it is."""
    from roundhouse.replays.stages import load_replay
    from roundhouse.stages.policy import delete_run

    replayed = load_replay(store, name)
    if not yes:
        typer.confirm(f"Delete {replayed.location.uri}?", abort=True, err=True)
    delete_run(replayed)
    out(f"{name}: deleted")


@app.command("rescore")
def rescore_rollouts(
    name: Annotated[str, typer.Option(help="Dataset that gets the verdicts.", callback=store_name)],
    run_id: JudgedRun = None,
    dataset: JudgedDatasets = None,
    iterations: JudgedIterations = None,
    overrides: Overrides = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Judge stored rollouts with the environment as it is now, or as --set environment.… changes it. Nothing is generated.

    The verdicts are new versions of a dataset, which training reads as any other. The same command resumes.
    """
    from roundhouse.replays import rescore
    from roundhouse.replays.verdicts import collections_of, judging_config

    source, span = _judged(run_id, dataset, iterations)
    configs = [judging_config(store, each, overrides or []) for each in collections_of(store, source, span)]
    for config in {config.run_id: config for config in configs}.values():
        accept_code(config, overrides, trust_store, "environment")

    diff = rescore(
        store,
        source,
        name,
        iterations=span,
        overrides=overrides or [],
        progress=lambda done, total: progress(f"{done} of {total} rollouts judged"),
    )
    out_json(diff.as_json()) if as_json else show_verdicts(diff)


@app.command("bisect")
def bisect_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run; its metric fell.")],
    metric: Annotated[str, typer.Option(help="held_out_reward, or reward of the collections.")] = "held_out_reward",
    against: Annotated[
        str | None, typer.Option(help="Run with the right configuration. Default: the parent of a fork.")
    ] = None,
    overrides: Overrides = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Start the run's engine and evaluate replayed versions with it.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave all replays in the store, not only the deciding one.")
    ] = False,
    budget: Annotated[
        int | None,
        typer.Option(help="Stage runs that the smallest set of groups or keys may take; left out, 64.", min=0),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Find the iteration that made a metric fall, and the cause: rows, reward code, configuration, weights, engine or
    code.

    It replays the iteration with one correction at a time; --set names a configuration that is assumed correct. Exits
    with 1 if the metric fell.
    """
    from roundhouse.infra.services import services_of
    from roundhouse.replays.bisect import bisect, right_run
    from roundhouse.replays.narrowing import NARROWING_BUDGET
    from roundhouse.replays.stages import substituted_config
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    config = substituted_config(run.config, overrides or [])
    for each in (config, right_run(run, against).config):
        accept_code(each, overrides, trust_store)
    with services_of(config) if evaluate else nullcontext():
        bisection = bisect(
            store,
            run_id,
            metric,
            against=against,
            overrides=overrides or [],
            evaluate=evaluate,
            keep=keep,
            budget=NARROWING_BUDGET if budget is None else budget,
            say=progress,
        )
    out_json(bisection.as_json()) if as_json else _show_bisection(bisection)
    if bisection.fall is not None:
        raise typer.Exit(DIFFERS)


def _show_bisection(found: Bisection) -> None:
    from rich.text import Text

    terminal, fall = console(), found.fall
    if fall is None:
        out(f"{found.metric} of {len(found.values)} versions: no fall that chance does not explain")
        return
    out(
        f"{found.metric} falls from {fall.before:.4g} at version {fall.good} to {fall.after:.4g} at version {fall.bad}, "
        f"{fall.standard_errors:.1f} standard errors"
    )
    rows = []
    for trial in found.trials:
        share = "not measured" if trial.recovered is None else f"{trial.recovered:.0%}"
        rows.append((trial.cause, trial.what, figure(trial.value), share))
    print_table(("put right", "what", found.metric, "recovered"), rows)
    for note in found.notes:
        terminal.print(Text(note, style="yellow"))
    if found.cause:
        terminal.print(Text(f"Cause: {found.cause}, iteration {found.iteration}. {found.detail}", style="bold"))
    elif found.likely:
        terminal.print(
            Text(
                f"Likely cause: {found.likely}, between versions {fall.good} and {fall.bad}. It was not measured: recorded "
                f"rollouts cannot judge its weights. To measure it: roundhouse bisect {found.run_id} "
                f"--metric {found.metric} --evaluate",
                style="bold",
            )
        )
    else:
        terminal.print(
            "No cause: nothing that could be put right gives back half of the fall. Name a configuration with --set."
        )
    bound = f" of at most {found.narrowing_bound}" if found.narrowing_bound else ""
    out(f"{found.stage_runs} stages ran again, {found.narrowing_runs}{bound} more for the smallest set")


@app.command("branch")
def branch_turn(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run that collected the rollouts.")],
    rollout: Annotated[list[str], typer.Option(help="Id of a stored rollout, such as train/7/0; may be repeated.")],
    iteration: Annotated[int, typer.Option(help="The iteration that collected them.", min=0)],
    turn: Annotated[int, typer.Option(help="First turn to sample again; 0 is the first reply.", min=0)],
    name: Annotated[str, typer.Option(help="Dataset that gets the branches.", callback=store_name)],
    version: Annotated[
        str, typer.Option(help="Policy version that continues: newest, promoted or a number.")
    ] = "newest",
    samples: Annotated[int, typer.Option(help="Branches of each rollout.", min=1)] = 4,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Continue stored rollouts from one of their turns with any policy version.

    The environment is replayed up to that turn, and each of its answers compared with the recorded one. Branches are a
    dataset to train from; only the new turns are generated and trained on.
    """
    from roundhouse.infra.services import services_of
    from roundhouse.replays.branches import branch, stored_rollouts
    from roundhouse.stages.refit import engine_at, engine_released_after_use
    from roundhouse.store.run import load_run, no_such_version, version_named

    run = load_run(store, run_id)
    accept_code(run.config, None, trust_store)
    number = version_named(run, version)
    if (checkpoint := run.checkpoint(number).reference()) is None:
        raise no_such_version(run, number)
    stored_rollouts(run, iteration, rollout)
    with services_of(run.config), engine_released_after_use(run):
        outcome = branch(run, iteration, rollout, turn, name, engine_at(run, number), checkpoint, samples)
    if as_json:
        facts = {"rewards": outcome.rewards, "before": outcome.before, "reasons": outcome.reasons}
        return out_json({"version": outcome.version.uri, "generated_tokens": outcome.generated_tokens} | facts)
    for rollout_id, rewards in outcome.rewards.items():
        mean = sum(rewards) / len(rewards) if rewards else None
        out(
            f"{rollout_id}: {figure(outcome.before[rollout_id])} → {figure(mean)} over {len(rewards)} branches from turn {turn}"
        )
    for reason, count in outcome.reasons.items():
        out(f"failed: {count} {reason}")
    return out(f"{outcome.generated_tokens} tokens generated; {outcome.version.uri}")


env_app.command("try")(env_try)


@env_app.command("test")
def env_test(
    run_id: JudgedRun = None,
    dataset: JudgedDatasets = None,
    iterations: JudgedIterations = None,
    overrides: Overrides = None,
    limit: Annotated[int, typer.Option(help="Rollouts of the corpus, at most.", min=1)] = 1000,
    mutants: Annotated[
        int, typer.Option(help="Changes of the environment's module that the corpus should catch.", min=0)
    ] = 0,
    min_score: Annotated[float, typer.Option(help="The least share of mutants caught.", min=0, max=1)] = 0.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Test whether the environment still answers and judges recorded rollouts as it did. Exits with 1 if not.

    With --mutants N, as many changed copies of its module are judged, too: copies that no rollout of the corpus detects
    are listed, and --min-score fails the test if they are too many.
    """
    from roundhouse.replays.environment_tests import check_environment
    from roundhouse.replays.verdicts import collections_of, judging_config
    from roundhouse.stages.collect import read_rollouts

    source, span = _judged(run_id, dataset, iterations)
    collections = collections_of(store, source, span)
    config = judging_config(store, collections[0], overrides or [])
    accept_code(config, overrides, trust_store, "environment")
    corpus: list[Any] = []
    for reference in collections:
        if len(corpus) < limit:
            corpus += read_rollouts(reference)
    report = check_environment(corpus[:limit], config.environment, mutants)
    if as_json:
        out_json(report.as_json())
    else:
        show_verdicts(report.verdicts)
        out(f"judged in {report.seconds:.1f} s")
        if report.score is not None:
            out(f"mutation score {report.score:.2f}: {len(report.mutants)} mutants")
        for each in report.mutants:
            if not each.caught:
                out(f"not caught, line {each.line}: {each.change}")
    if not report.unchanged or (report.score is not None and report.score < min_score):
        raise typer.Exit(DIFFERS)


def _judged(
    run_id: str | None, dataset: list[str] | None, iterations: str | None
) -> tuple[str | list[str], range | None]:
    """Return the rollouts to judge: a run with a range of its iterations, or datasets."""
    from roundhouse.errors import ConfigError

    if (run_id is None) == (not dataset):
        raise ConfigError("Name a run, or datasets with --dataset: one of the two is judged.")
    if run_id is None and iterations is not None:
        raise ConfigError("--iterations are those of a run; datasets have versions: --dataset nightly@<version>.")
    return (run_id if run_id is not None else dataset or []), (None if iterations is None else span_of(iterations))


def show_verdicts(diff: VerdictDiff) -> None:
    """Counts, tasks with flips and examples, on the terminal."""
    from rich.text import Text

    terminal = console()
    terminal.print(", ".join(f"{count} {outcome}" for outcome, count in diff.counts.items()), highlight=False)
    for reason, count in diff.reasons.items():
        terminal.print(Text(f"refused: {count} {reason}", style="yellow"))
    if diff.by_task:
        outcomes = ("flipped", "equal", "refused")
        most = sorted(diff.by_task.items(), key=lambda item: -item[1]["flipped"])[:ROWS_SHOWN]
        print_table(("task", *outcomes), ([task, *(own.get(each, 0) for each in outcomes)] for task, own in most))
    for row in diff.flipped[:FLIPS_SHOWN]:
        change = f"{row['reward_before']:g} ({row['status_before']}) → {row['reward_after']:g} ({row['status_after']})"
        terminal.print(Text(f"{row['rollout_id']}: {change}"))
    for uri in diff.versions:
        out(uri)


def _show(found: Comparison) -> None:
    from rich.text import Text

    terminal, rows = console(), []
    for stage in found.stages:
        parts = [f"{name}: {each['changed']} of {each['before']} rows" for name, each in stage.rows.items()]
        parts += [f"weights ({', '.join(stage.weights)})"] if stage.weights else []
        metrics = sorted(stage.metrics)[:METRICS_SHOWN]
        parts += [f"{name} {figure(stage.metrics[name][0])} → {figure(stage.metrics[name][1])}" for name in metrics]
        if len(stage.metrics) > len(metrics):
            parts.append(f"{len(stage.metrics) - len(metrics)} more metrics")
        for name, means in stage.distribution.items():
            distance = means["standard_errors"]
            apart = "neither varies" if distance is None else f"{distance:+.1f} standard errors"
            parts.append(f"{name} {figure(means['before'])} → {figure(means['after'])} ({apart})")
        rows.append((stage.iteration, stage.stage, stage.outcome, "; ".join(parts)))
    print_table(("iteration", "stage", "outcome", "what differs"), rows)
    if found.first is not None:
        terminal.print(Text(f"First difference: iteration {found.first.iteration}, {found.first.stage}", style="bold"))
        for cause in found.first.because:
            terminal.print(Text(f"  because of {cause}"))
    if any(stage.outcome == "distribution" for stage in found.stages):
        terminal.print("collect and evaluate sample from an engine: they cannot be equal, their means are compared.")
    out(found.uri)
