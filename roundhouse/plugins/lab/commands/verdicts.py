"""`roundhouse rescore | env test`: judge recorded rollouts anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    Overrides,
    StoreOption,
    TrustStore,
    accept_code,
    console,
    out,
    out_json,
    print_table,
    store_name,
)
from roundhouse.plugins.lab.commands import DIFFERS, progress, span_of

if TYPE_CHECKING:
    from roundhouse.plugins.lab.replays.verdicts import VerdictDiff

ROWS_SHOWN, FLIPS_SHOWN = 20, 10

JudgedRun = Annotated[str | None, typer.Argument(metavar="RUN", help="Run; its rollouts are judged.")]
JudgedDatasets = Annotated[
    list[str] | None,
    typer.Option("--dataset", help="Instead of a run: nightly, nightly@all, nightly@<version>; may be repeated."),
]
JudgedIterations = Annotated[
    str | None, typer.Option("--iterations", help="first:last or one; left out: all that collected.")
]


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
    from roundhouse.plugins.lab.replays import rescore
    from roundhouse.plugins.lab.replays.verdicts import collections_of, judging_config

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
    from roundhouse.plugins.lab.replays.environment_tests import check_environment
    from roundhouse.plugins.lab.replays.verdicts import collections_of, judging_config
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
