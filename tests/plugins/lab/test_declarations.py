"""The declarations of the plug-in."""

from __future__ import annotations

import inspect

import typer

from roundhouse import plugins
from roundhouse.plugins.lab import PLUGINS


def test_the_line_of_a_command_in_the_list_is_the_first_paragraph_of_its_help() -> None:
    for key, plugin in PLUGINS.items():
        if key.startswith("command."):
            command = plugins.factory("command", key.partition(".")[2])
            text = command.info.help if isinstance(command, typer.Typer) else inspect.getdoc(command)
            assert plugin.traits == " ".join(text.partition("\n\n")[0].split())
