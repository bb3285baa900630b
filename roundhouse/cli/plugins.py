"""`roundhouse plugins`: the plug-ins of installed packages and of the folders of Roundhouse."""

from __future__ import annotations

import typer

from roundhouse.cli.options import JsonOption, out, out_json

app = typer.Typer()


@app.command("plugins")
def list_plugins(as_json: JsonOption = False) -> None:
    """List the plug-ins of packages and folders, and load each. Exits with 1 when one cannot be used."""
    from roundhouse import plugins

    entries = [(each.key, each.package, problem) for each, problem in plugins.declarations()]
    if as_json:
        out_json([{"plugin": key, "package": package, "problem": problem} for key, package, problem in entries])
    else:
        for key, package, problem in entries:
            out(f"{key}  {package}" + (f"\n  {problem}" if problem else ""))
    if any(problem for _, _, problem in entries):
        raise typer.Exit(1)
