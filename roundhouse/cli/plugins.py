"""`roundhouse plugins list | install`: the plug-ins of installed packages and of folders, and their packages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from roundhouse.cli.options import JsonOption, out, out_json

app = typer.Typer(no_args_is_help=True, help="List the plug-ins, and install the packages of one.")


@app.command("list")
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


@app.command()
def install(
    name: Annotated[str, typer.Argument(help="Plug-in, such as verifiers.")],
    packages: Annotated[
        list[str] | None, typer.Argument(help="Further packages for its interpreter, such as ./my_environment.")
    ] = None,
) -> None:
    """Install the packages of a plug-in into its separate interpreter, or show the command for Roundhouse's own interpreter."""
    from roundhouse.infra.interpreters import find_installable, install_interpreter

    plugin = find_installable(name)
    if plugin.packages:
        out(f"{name}: {install_interpreter(name, plugin.packages, packages or [])}")
    else:
        extra = f"'roundhouse[{plugin.extra}]'"
        out(
            f"{name} runs in Roundhouse's interpreter. Install its packages there:\n{sys.executable} -m pip install {extra}"
        )
