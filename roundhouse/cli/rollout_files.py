"""`roundhouse import | export`: rollouts as files of other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    NewStoreOption,
    StoreOption,
    error_console,
    out,
    out_json,
    store_name,
    written,
)
from roundhouse.errors import ConfigError

app = typer.Typer()


@app.command("import")
def import_file(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File of rollouts, or a directory of such files.")],
    name: Annotated[str, typer.Option(help="Name of the dataset.", callback=store_name)],
    version: Annotated[str, typer.Option(help="Version of the dataset.", callback=store_name)] = "v000001",
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="Name of a reader, such as atif or trl; left out: by content."),
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="Key of the format, such as rewards.correct=1.")
    ] = None,
    policy_version: Annotated[int, typer.Option(help="Version of the weights that made the rollouts.", min=0)] = 0,
    store: NewStoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Read rollouts that another system made into a dataset: for SQL, the viewer, re-scoring and offline training."""
    from roundhouse.config.loading import apply_override
    from roundhouse.stages.importing import import_files

    keys: dict[str, Any] = {}
    for option in options or []:
        apply_override(keys, option)
    imported = import_files(
        store, name, path, version, file_format=file_format, options=keys, policy_version=policy_version
    )
    counts = imported.reference.counts
    if as_json:
        return out_json(
            {
                "uri": imported.reference.uri,
                "format": imported.format,
                "counts": counts,
                "with_tokens": imported.with_tokens,
            }
        )
    if imported.note:
        error_console().print(imported.note, markup=False, highlight=False)
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return out(f"{imported.format}: {text}; {imported.with_tokens} with token IDs\n{imported.reference.uri}")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run's id, or <name>/<version> of a dataset.")],
    output: Annotated[Path, typer.Option(help="Directory to write to.")],
    file_format: Annotated[str, typer.Option("--format", help="Name of a writer, such as atif.")],
    iteration: Annotated[int | None, typer.Option(help="Iteration of a run.", min=1)] = None,
    stage: Annotated[str, typer.Option(help="Stage of the iteration: collect or evaluate.")] = "collect",
    agent: Annotated[str | None, typer.Option(help="Agent for rows without one.")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write collected rollouts as files of another system."""
    from roundhouse import plugins
    from roundhouse.errors import StoreError
    from roundhouse.store.location import Location
    from roundhouse.store.stage import Stage

    if file_format not in (formats := plugins.names("writer")):
        raise ConfigError(f"--format is {file_format!r}. Formats: {', '.join(sorted(formats))}.")
    path = f"datasets/{run}" if iteration is None else f"runs/{run}/iterations/{iteration:06d}/{stage}"
    reference = Stage(Location(store) / path, kind=stage, run_id=run, iteration=iteration or 0).reference()
    if reference is None:
        raise StoreError(
            f"{path} in {store} is not there, or not complete. Give a run and its --iteration, or a dataset's <name>/<version>."
        )
    new = "" if output.is_dir() else f"made the directory {output}\n"
    with written("--output", output):
        exported = plugins.factory("writer", file_format)(reference, output, agent)
    out(f"{new}{exported.rollouts} rollouts, {exported.failures} failures\n{exported.file}")
