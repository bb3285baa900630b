"""`roundhouse runs doctor`, and the symptoms at the end of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out, out_json, print_table

if TYPE_CHECKING:
    from roundhouse.plugins.lab.simulation.symptoms import Symptom
    from roundhouse.store.run import Run


def runs_doctor(
    run_id: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run with a collected iteration. The bottleneck needs a synchronous run with two iterations.",
        ),
    ],
    since: Annotated[
        int | None, typer.Option(help="The first iteration that counts; left out, the second.", min=1)
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Symptoms with cause and remedy; which part of an iteration binds, and what each single change would gain."""
    from dataclasses import asdict

    from roundhouse.errors import StoreError
    from roundhouse.plugins.lab.simulation.doctor import diagnose
    from roundhouse.plugins.lab.simulation.symptoms import symptoms
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    run_symptoms = symptoms(run)
    report, unknown = None, ""
    try:
        report = diagnose(run, since)
    except StoreError as error:
        unknown = str(error)
    if as_json:
        answer = {"symptoms": [asdict(each) for each in run_symptoms], "unknown": unknown}
        return out_json((report.as_json() if report else {}) | answer)
    for each in run_symptoms:
        out(symptom_text(each))
    if not run_symptoms:
        out("no symptoms")
    if report is None:
        return out(unknown)
    parts = sorted(report.parts.items(), key=lambda part: -part[1])
    rows = ((name, f"{seconds:.2f}", f"{seconds / report.seconds:.0%}") for name, seconds in parts)
    print_table(("part", "seconds", "share"), rows)
    out(
        f"{report.binds} binds: {report.seconds:.2f} s an iteration over {report.iterations} ({report.simulated:.2f} simulated)"
    )
    changes = (
        (each.change, f"{each.seconds:.2f} s", f"{each.gain:+.2f} s", f"± {each.error:.2f}", each.what)
        for each in report.changes
    )
    print_table(("change", "iteration", "gain", "error", "what"), changes)
    for note in report.notes:
        out(note)
    return None


def symptom_text(symptom: Symptom) -> str:
    """A symptom in three lines."""
    return f"{symptom.symptom}: {symptom.evidence}\n   likely cause: {symptom.cause}\n   → {symptom.remedy}"


def print_symptoms(run: Run) -> None:
    """Print the symptoms of a run's newest iterations, if it has any."""
    from roundhouse.errors import RoundhouseError
    from roundhouse.plugins.lab.simulation.symptoms import symptoms

    try:
        present = symptoms(run)
    except RoundhouseError:  # it has collected nothing
        return
    if present:
        console().print(f"\n[bold]Symptoms[/] (roundhouse runs doctor {run.run_id})", highlight=False)
    for each in present:
        console().print(symptom_text(each), style="yellow", highlight=False, markup=False)
