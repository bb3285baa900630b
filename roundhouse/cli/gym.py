"""`roundhouse gym …`: NeMo Gym's configuration, servers and data on the command line."""

from __future__ import annotations

import typer

from roundhouse.cli import gym_data, gym_servers

app = typer.Typer(no_args_is_help=True, help="Environments by NeMo Gym's contracts: configuration, servers, data.")
app.add_typer(gym_servers.app)
app.add_typer(gym_data.app)
