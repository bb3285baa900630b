"""`roundhouse view`: look at the rollouts of a store in a browser, or write a page of one iteration."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from roundhouse.cli.options import DEFAULT_STORE, StoreOption, console


def view(
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="The run to begin with; the newest when left out.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)] = 0,
    iteration: Annotated[int | None, typer.Option(help="The iteration to begin with, or to export.", min=0)] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write a page of one iteration that needs no server, and stop.")
    ] = None,
    stage: Annotated[str, typer.Option(help="collect or evaluate.")] = "collect",
    rollouts: Annotated[
        int, typer.Option(help="At most so many rollouts with their texts in an export.", min=1)
    ] = 2000,
) -> None:
    """Inspect the policy's work: rollouts, groups, conversations, tokens, quarantine. Read-only, on this machine
    only."""
    from roundhouse.plugins.view.catalog import Catalog, Scope

    terminal = console()
    scope = Scope.of(
        {"run": run_id or "any", "iteration": "all" if iteration is None else str(iteration), "stage": stage}
    )
    if export is not None:
        if run_id is None or iteration is None:
            raise typer.BadParameter(
                "--export needs the run and --iteration: roundhouse view RUN --iteration 3 --export page.html"
            )
        from roundhouse.plugins.view.server import export_page

        size = export_page(store, scope, export, rollouts)
        terminal.print(f"{export}: {size / 2**20:.1f} MiB", highlight=False, markup=False)
        return
    catalog = Catalog(store)
    if run_id is not None and iteration is not None:
        catalog.stages(scope)  # or the run or iteration does not exist
    elif run_id is not None:
        catalog.iterations(run_id)
    from urllib.parse import urlencode

    from rich.markup import escape

    from roundhouse.plugins.view.server import serve

    filters = {"run": run_id, "iteration": scope.iteration, "stage": scope.stage if scope.stage != "collect" else None}
    query = urlencode({name: value for name, value in filters.items() if value is not None})

    def on_ready(url: str) -> None:
        terminal.print(
            f"[bold]{url}{'?' + query if query else ''}[/]  {escape(catalog.root.uri)}  (Ctrl-C ends it)",
            highlight=False,
        )

    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        serve(store, port, on_ready)
