"""`roundhouse store`: is it whole, and what can go."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out

app = typer.Typer(no_args_is_help=True, help="Check a store, and clear it of what nothing needs.")


@app.command()
def verify(
    store: StoreOption = DEFAULT_STORE,
    run_id: Annotated[str | None, typer.Option("--run", help="Only this run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every file, reference and ledger of every manifest. Exits with 1 when something is damaged."""
    from roundhouse.store.verification import verify as check
    from roundhouse.trajectories.ledger import ledger_faults

    found = check(store, run_id, also=ledger_faults)
    if as_json:
        out(json.dumps(asdict(found), indent=1))
    else:
        from rich.markup import escape

        terminal = console()
        for problem in found.problems:
            said = escape(f"{problem.uri}\n        {problem.what}\n      → {problem.remedy}")
            terminal.print(f"[red]damaged[/] {said}", highlight=False)
        for uri in found.unfinished:
            terminal.print(f"[yellow]unfinished[/] {escape(uri)}", highlight=False)
        terminal.print(
            f"{found.manifests} manifests, {found.files} files, {found.size / 2**20:.1f} MiB checked: "
            f"{len(found.problems)} damaged, {len(found.unfinished)} unfinished",
            highlight=False,
        )
    if found.problems:
        raise typer.Exit(1)


@app.command()
def gc(
    store: StoreOption = DEFAULT_STORE,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it. Without this, it is only listed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the files that no run needs."""
    from roundhouse.store import verification

    found = verification.find_garbage(store)
    if delete:
        verification.collect_garbage(store, found)
    if as_json:
        out(json.dumps([asdict(item) for item in found], indent=1))
        return
    for item in found:
        out(f"{item.name}: {item.reason}")
    done = "deleted" if delete else "found; delete them with --delete"
    console().print(f"{len(found)} files {done}", highlight=False)
