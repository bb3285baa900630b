"""`roundhouse gym start | status | resolve | validate | init`: a NeMo Gym configuration and the servers it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundhouse.cli.options import JsonOption, error_console, out, out_json, print_table, written

if TYPE_CHECKING:
    from roundhouse.plugins.nemo_gym.config.resolve import Resolution
    from roundhouse.plugins.nemo_gym.config.sources import SearchRoots

app = typer.Typer()

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG…] [OVERRIDE…]",
        help="Configuration files, and overrides: +key=value, ++key=value, key=value, ~key.",
    ),
]
SearchDirs = Annotated[
    list[Path] | None, typer.Option("--search-dir", help="Where relative paths are looked for first. Repeatable.")
]
Root = Annotated[
    Path | None, typer.Option("--root", envvar="NEMO_GYM_ROOT", help="Checkout of NeMo Gym, looked in last.")
]
Ours = Annotated[
    bool,
    typer.Option("--ours", help="Put our agent and model servers in the place of NeMo Gym's of the same contract."),
]
HeadPort = Annotated[
    int | None, typer.Option("--head-port", help="Port of the head server. 0: any free one.", min=0, max=65535)
]
Python = Annotated[
    Path | None,
    typer.Option("--python", help="Interpreter for all foreign servers, instead of their virtual environments."),
]
Install = Annotated[bool, typer.Option("--install", help="Make foreign servers' virtual environments with uv.")]


@app.command()
def start(
    arguments: Arguments = None,
    search_dirs: SearchDirs = None,
    root: Root = None,
    ours: Ours = False,
    head_port: HeadPort = None,
    python: Python = None,
    install: Install = False,
    ray: Annotated[
        bool, typer.Option("--ray/--no-ray", help="Start the Ray cluster that NeMo Gym's own servers join.")
    ] = True,
    logs: Annotated[Path, typer.Option(help="Directory of the servers' output.")] = Path(".roundhouse/gym"),
    start_seconds: Annotated[float, typer.Option(help="Time limit until all servers answer.", min=1)] = 300,
    as_json: JsonOption = False,
) -> None:
    """Start the servers of a configuration and keep them until Ctrl-C, or until one of them ends.

    ++dry_run=true checks it, prints it with its secrets masked, and starts nothing.
    """
    from roundhouse.errors import ConfigError
    from roundhouse.plugins.nemo_gym.config.resolve import PORT_RANGE, free_port
    from roundhouse.plugins.nemo_gym.servers.commands import Foreign, commands
    from roundhouse.plugins.nemo_gym.servers.start import StartOptions, run

    roots = _roots(search_dirs, root)
    port_overrides = [] if head_port is None else [f"++head_server.port={head_port or free_port(PORT_RANGE, ())}"]
    resolution = _resolved([*(arguments or []), *port_overrides], roots, ours)
    _show_warnings(resolution)
    resolution.raise_problems()
    if not resolution.instances:
        raise ConfigError("The configuration names no server. Give a file, such as roundhouse gym start weather.yaml.")
    server_commands, resolution.problems = commands(resolution, roots, Foreign(python, install))
    resolution.raise_problems()
    if resolution.dry_run:
        out(resolution.masked_yaml())
        error_console().print("dry_run is true: nothing was started.", highlight=False)
        return
    head = resolution.tree["head_server"]
    directory = Path(resolution.tree.get("nemo_gym_log_dir") or logs / str(head["port"])).resolve()
    terminal = error_console()
    options = StartOptions(
        logs=directory,
        start_seconds=start_seconds,
        head_token=head.get("token"),
        install=install,
        ray=ray,
        announce=lambda text: terminal.print(f"  {text}", highlight=False, markup=False, soft_wrap=True),
    )
    run(
        resolution,
        server_commands,
        options,
        ready=lambda line: out(
            json.dumps(line) if as_json else f"All servers ready! Head server: {line['head']}. Ctrl-C ends them."
        ),
    )


@app.command()
def resolve(arguments: Arguments = None, search_dirs: SearchDirs = None, root: Root = None, ours: Ours = False) -> None:
    """Print the merged configuration, secrets masked."""
    resolution = _resolved(arguments or [], _roots(search_dirs, root), ours)
    _show_warnings(resolution)
    if resolution.tree:
        out(resolution.masked_yaml())
    resolution.raise_problems()


@app.command()
def validate(
    arguments: Arguments = None,
    search_dirs: SearchDirs = None,
    root: Root = None,
    ours: Ours = False,
    python: Python = None,
    install: Install = False,
    as_json: JsonOption = False,
) -> None:
    """Report all faults of a configuration; exit code 1 if any."""
    from roundhouse.plugins.nemo_gym.servers.commands import Foreign, commands

    roots = _roots(search_dirs, root)
    resolution = _resolved(arguments or [], roots, ours)
    problems = list(resolution.problems)
    if arguments and not resolution.instances and not problems:
        problems = [
            "no server is in it. A NeMo Gym configuration has resources_servers, responses_api_agents or responses_api_models; "
            "one of a run is checked by `roundhouse train FILE --dry-run`"
        ]
    if not problems:
        problems = commands(resolution, roots, Foreign(python, install))[1]
    if as_json:
        servers = [{"name": one.name, "type": one.type, "kind": one.kind} for one in resolution.instances]
        out_json({"problems": problems, "warnings": resolution.warnings, "servers": servers})
    else:
        _show_warnings(resolution)
        for problem in problems:
            out(f"problem: {problem}")
        out(f"{len(resolution.instances)} servers, {len(problems)} problems, {len(resolution.warnings)} warnings")
    if problems:
        raise typer.Exit(1)


@app.command()
def status(
    head: Annotated[str, typer.Option("--head", help="URL of the head server.")] = "http://127.0.0.1:11000",
    as_json: JsonOption = False,
) -> None:
    """List running servers and whether they answer; exit code 1 if one does not."""
    from roundhouse.plugins.nemo_gym.servers.head import server_statuses

    servers = server_statuses(head)
    if as_json:
        out_json(servers)
    else:
        fields = ("process_name", "server_type", "name", "url", "pid", "up", "status")
        for one in servers:
            seconds = one.get("uptime_seconds")
            one["up"] = f"{seconds:.0f} s" if isinstance(seconds, int | float) else ""
        columns = ("server", "type", "implementation", "url", "pid", "up", "status")
        print_table(columns, ([one.get(name) for name in fields] for one in servers))
    if any(one["status"] != "success" for one in servers):
        raise typer.Exit(1)


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the environment: small letters, digits, underscores.")],
    directory: Annotated[Path, typer.Option(help="Where its directory is made.")] = Path(),
    is_minimal: Annotated[
        bool, typer.Option("--minimal", help="Write the class and the run's configuration alone.")
    ] = False,
) -> None:
    """Write a new environment: its class, its test, example rows, configurations of a run and of a server."""
    from roundhouse.plugins.nemo_gym.servers.scaffold import write_environment

    with written("--directory", directory):
        paths = write_environment(name, directory, is_minimal=is_minimal)
    for path in paths:
        out(str(path))
    run = directory / name / "run.yaml"
    error_console().print(f"Try next: roundhouse train {run} --dry-run, then without it", highlight=False, markup=False)


def _roots(search_dirs: list[Path] | None, root: Path | None) -> SearchRoots:
    from roundhouse.plugins.nemo_gym.config.sources import SearchRoots

    return SearchRoots.of(search_dirs or [], root)


def _resolved(arguments: list[str], roots: SearchRoots, ours: bool) -> Resolution:
    from roundhouse.plugins.nemo_gym.config.resolve import resolve as resolve_configuration

    overrides = [text for text in arguments if text[:1] in "+~" or ("=" in text and not Path(text).exists())]
    paths = [text for text in arguments if text not in overrides]
    return resolve_configuration(paths, overrides, roots, ours=ours)


def _show_warnings(resolution: Resolution) -> None:
    from rich.markup import escape

    for warning in resolution.warnings:
        error_console().print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
