"""`roundhouse gym`: the commands on servers and on files."""

from __future__ import annotations

import typer

from roundhouse.plugins.nemo_gym import data_commands, server_commands

gym = typer.Typer(no_args_is_help=True, help="Environments by NeMo Gym's contracts: configuration, servers, data.")
gym.add_typer(server_commands.app)
gym.add_typer(data_commands.app)
