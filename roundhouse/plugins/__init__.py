"""The registry of plug-ins: everything that a configuration chooses by the name of its kind.

Invariant: a key `role.name` has one declaration: in the core's own table, in a folder `roundhouse/plugins/<name>/`, or as an
entry point of an installed package. A name with two of them is refused, so that no package changes the meaning of a name. A
declaration is strings: it costs no import before a configuration uses it, and a broken package disturbs only the runs that name
it.

    [project.entry-points."roundhouse.plugins"]       # pyproject.toml of any package
    "environment.maze" = "maze:MAZE"

    MAZE = Plugin(factory="maze.environment:Maze", section="maze.section:MazeSection")      # maze.py

A folder of this package declares the same as a mapping `PLUGINS` from key to `Plugin`. docs/plugins.md shows each role.
"""

from __future__ import annotations

import functools
import importlib
import operator
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from roundhouse.errors import ConfigError
from roundhouse.plugins.built_in import BUILT_IN, Plugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BUILT_IN",
    "GROUP",
    "ROLES",
    "Plugin",
    "Role",
    "check",
    "chosen",
    "declarations",
    "factory",
    "find",
    "names",
    "resolve",
    "section",
    "traits",
]

T = TypeVar("T")
GROUP = "roundhouse.plugins"
"""Group of entry points."""
Role = Literal[
    "engine",
    "endpoint",
    "policy",
    "environment",
    "sandbox",
    "data_source",
    "algorithm",
    "loss",
    "curriculum",
    "weight_transport",
    "launcher",
    "infrastructure",
    "sink",
    "stage_hook",
    "train_service",
    "judge",
    "translator",
    "reader",
    "writer",
    "command",
    "operation",
    "service",
]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A plug-in outside of the core's table, not loaded."""

    key: str
    package: str
    """Distribution with its version, or a folder of this package."""
    origin: Plugin | EntryPoint

    def plugin(self) -> Plugin:
        """Load the declaration.

        Raises:
            ConfigError: the package cannot be imported, or the name is not a `Plugin`.
        """
        if isinstance(self.origin, Plugin):
            return self.origin
        candidate = _loaded(self.key, self.package, self.origin.load)
        if isinstance(candidate, Plugin):
            return candidate
        raise ConfigError(
            f"{self.key}: the entry point {self.origin.value} of {self.package} is a {type(candidate).__name__}, not a "
            f"roundhouse.plugins.Plugin. {_remedy(self.package)}"
        )


def names(role: Role) -> tuple[str, ...]:
    """Return the names of a role, built-in ones first, without loading any."""
    keys = dict.fromkeys([*BUILT_IN, *_others()])
    return tuple(key.partition(".")[2] for key in keys if key.startswith(f"{role}."))


def find(role: Role, name: str) -> Plugin:
    """Return the plug-in with a name.

    Raises:
        ConfigError: the name is unknown or declared twice, or its package cannot be imported.
    """
    return _found(role, name)[1]


def factory(role: Role, name: str) -> Any:
    """Import and return the plug-in's class or factory function.

    Raises:
        ConfigError: as `find`, or it cannot be imported.
    """
    package, plugin = _found(role, name)
    return _loaded(f"{role}.{name}", package, lambda: resolve(plugin.factory))


def chosen(role: Role, name: str, kind: type[T] | tuple[type[T], ...], key: str) -> type[T]:
    """Import and return the class that a configuration key names: a plug-in's name, `module:Class` or `file.py:Class`.

    Args:
        kind: the class is a subclass of this one, or of one of several.
        key: the configuration key, for the error.

    Raises:
        ConfigError: as `factory`, or the class is of another kind.
    """
    from roundhouse.imports import load_class

    if ":" in name:
        return load_class(name, kind, key)
    target = factory(role, name)
    if isinstance(target, type) and issubclass(target, kind):
        return target
    kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
    raise ConfigError(f"{key} is {name}, whose plug-in has the factory {target!r}, which is not a {kinds}.")


def section(role: Role, name: str) -> Any:
    """Import and return the configuration section of a kind.

    Raises:
        ConfigError: as `find`, or it cannot be imported, or is not the section of this kind.
    """
    package, plugin = _found(role, name)
    key = f"{role}.{name}"
    section_class = _loaded(key, package, lambda: resolve(plugin.section))
    kind = getattr(section_class, "model_fields", {}).get("kind")
    if kind is None or get_args(kind.annotation) != (name,):
        raise ConfigError(
            f"{key}: section {plugin.section!r} of {package} has no key `kind: Literal[{name!r}]`. {_remedy(package)}"
        )
    return section_class


def traits(role: Role, name: str) -> Any:
    """Return the facts of a plug-in, without importing its factory; None if it declares none.

    Raises:
        ConfigError: as `find`, or they cannot be imported.
    """
    package, plugin = _found(role, name)
    return _loaded(f"{role}.{name}", package, lambda: resolve(plugin.traits))


def check(role: Role, name: str, chosen: Any) -> None:
    """Run the plug-in's own check of a section before a run starts.

    Raises:
        ConfigError: as `find`, or raised by the check.
    """
    package, plugin = _found(role, name)
    if plugin.check is not None:
        _loaded(f"{role}.{name}", package, lambda: resolve(plugin.check))(chosen)


def declarations() -> Iterator[tuple[Declaration, str]]:
    """Yield each declaration outside of the core's table, with its problem; the problem is empty if it can be used."""
    for key, declared in _others().items():
        role, _, name = key.partition(".")
        for each in declared:
            yield each, _problem(each, role, name)


def _problem(declared: Declaration, role: str, name: str) -> str:
    if role not in ROLES or not name:
        return f"{declared.key}: unknown role {role!r}. Roles: {', '.join(ROLES)}."
    try:
        plugin = find(role, name)
        factory(role, name)
        if plugin.section is not None:
            section(role, name)
    except ConfigError as error:
        return str(error)
    return ""


def _found(role: Role, name: str) -> tuple[str, Plugin]:
    """Return a plug-in with its package."""
    key = f"{role}.{name}"
    declared = _others().get(key, ())
    if key in BUILT_IN:
        if declared:
            packages = " and ".join(each.package for each in declared)
            raise ConfigError(f"{key} is built in, and declared by {packages}. Rename it there. {_remedy(packages)}")
        return "roundhouse", BUILT_IN[key]
    if not declared:
        raise ConfigError(f"unknown {role} {name!r}. Available: {', '.join(names(role)) or 'none'}.")
    if len(declared) > 1:
        packages = " and ".join(each.package for each in declared)
        raise ConfigError(f"{key} is declared by {packages}. Uninstall one of them.")
    return declared[0].package, declared[0].plugin()


def resolve(target: str | object) -> Any:
    """Return the object that `module:name` names; any other object as it is."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def _loaded(key: str, package: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:
        if package == "roundhouse":
            raise  # our own fault, with its traceback
        from roundhouse.user_code import describe_error

        raise ConfigError(
            f"{key} is declared by {package}, which cannot be imported: {describe_error(error)}. {_remedy(package)}"
        ) from error


def _remedy(package: str) -> str:
    name = package.partition(" ")[0]
    return f"Repair or uninstall the package: pip install --force-reinstall {name}, or pip uninstall {name}."


def _others() -> Mapping[str, tuple[Declaration, ...]]:
    return _declared_on(tuple(sys.path), tuple(__path__))


@functools.lru_cache(maxsize=8)
def _declared_on(path: tuple[str, ...], folders: tuple[str, ...]) -> Mapping[str, tuple[Declaration, ...]]:
    """Return the declarations below the folders and of the packages on a search path: reading 300 packages takes 20 ms."""
    by_key: dict[str, tuple[Declaration, ...]] = {}
    for each in (*_of_folders(folders), *_of_packages()):
        if each not in by_key.get(each.key, ()):
            by_key[each.key] = (*by_key.get(each.key, ()), each)
    return by_key


def _of_folders(folders: Iterable[str]) -> Iterable[Declaration]:
    for module in pkgutil.iter_modules(folders):
        if module.ispkg:
            folder = importlib.import_module(f"{__name__}.{module.name}")
            for key, plugin in folder.PLUGINS.items():
                yield Declaration(key, f"roundhouse.plugins.{module.name}", plugin)


def _of_packages() -> Iterable[Declaration]:
    from importlib.metadata import entry_points  # 30 ms that no command without a configuration pays

    for point in entry_points(group=GROUP):
        package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        yield Declaration(point.name, package, point)
