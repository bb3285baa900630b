"""The commands of the root and of its groups: built-in ones and those of plug-ins, converted to click only when they run.

Invariant: `roundhouse --help` and a command do not pay for the options of other commands, which take half of a start; a package
that cannot be imported disturbs only its own command.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from roundhouse import plugins
from roundhouse.errors import ConfigError
from roundhouse.imports import late_classes


@dataclass(frozen=True, slots=True)
class Late:
    """A command that is not converted yet."""

    help: str
    hidden: bool
    add: Callable[[typer.Typer, str], object]
    """Register it in a Typer application by a name."""

    def summary(self, name: str) -> TyperCommand:
        """Return a command that has the line of the list alone."""
        return TyperCommand(name, help=self.help, hidden=self.hidden)

    def converted(self, name: str) -> Any:
        """Return the command of click.

        Raises:
            ConfigError: the package of a plug-in cannot be imported.
        """
        root = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        self.add(root, name)
        return typer.main.get_group(root).commands[name]


class LateCommands(MutableMapping[str, Any]):
    """Commands of a group by name."""

    def __init__(self, commands: Mapping[str, Any]) -> None:
        self._commands = dict(commands)

    def __getitem__(self, name: str) -> Any:
        command = self._commands[name]
        if isinstance(command, Late):
            command = self._commands[name] = command.converted(name)
        return command

    def __setitem__(self, name: str, command: Any) -> None:
        self._commands[name] = command

    def __delitem__(self, name: str) -> None:
        del self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


def late_commands(groups: Sequence[tuple[typer.Typer, str | None]]) -> type[TyperGroup]:
    """Return the class of a root with these groups of commands, and with the commands of plug-ins."""
    return _late_group(lambda: _of_plugins("", dict(_built_in(groups))))


def _late_group(late: Callable[[], Mapping[str, Late]]) -> type[TyperGroup]:
    """Return the class of a group that has these commands after its own."""

    class Group(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self._late = late()
            self.commands = LateCommands({**self.commands, **self._late})
            self._lists = False

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self._lists = True
            try:
                with late_classes(
                    "rich.markdown:Markdown", "rich.traceback:Traceback"
                ):  # a quarter of this command's time
                    super().format_help(ctx, formatter)
            finally:
                self._lists = False

        def list_commands(self, ctx: Any) -> list[str]:
            return list(self.commands)  # the base class would convert each

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if self._lists and cmd_name in self._late:
                return self._late[cmd_name].summary(cmd_name)
            return super().get_command(ctx, cmd_name)

    return Group


def _built_in(groups: Sequence[tuple[typer.Typer, str | None]]) -> Iterator[tuple[str, Late]]:
    for group, name in groups:
        if name is not None:
            yield name, Late(str(group.info.help or ""), False, functools.partial(_add_group, group))
            continue
        for info in group.registered_commands:
            assert info.callback is not None, "a command is a function"
            own = info.name or typer.main.get_command_name(info.callback.__name__)
            yield own, Late(inspect.getdoc(info.callback) or "", info.hidden, functools.partial(_add_command, info))


def _of_plugins(prefix: str, commands: dict[str, Late]) -> dict[str, Late]:
    """Add the plug-ins' commands with a prefix in their names: `runs ` for those of the group `runs`."""
    for full_name in plugins.names("command"):
        name, space, _ = full_name.removeprefix(prefix).partition(" ")
        if not full_name.startswith(prefix) or (space and name in commands):
            continue
        if space:
            commands[name] = Late("", False, functools.partial(_add_group, typer.Typer(no_args_is_help=True)))
            continue
        try:
            line = str(plugins.find("command", full_name).traits or "")
        except ConfigError as error:
            line = str(error)
        commands[name] = Late(line, False, functools.partial(_add_plugin, full_name))
    return commands


def _add_group(group: typer.Typer, root: typer.Typer, name: str) -> None:
    root.add_typer(group, name=name, cls=_late_group(lambda: _of_plugins(f"{name} ", {})))


def _add_command(info: Any, root: typer.Typer, name: str) -> None:
    root.registered_commands.append(info)


def _add_plugin(full_name: str, root: typer.Typer, name: str) -> None:
    command = plugins.factory("command", full_name)
    if isinstance(command, typer.Typer):
        _add_group(command, root, name)
    else:
        root.command(name)(command)
