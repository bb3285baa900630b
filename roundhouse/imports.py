"""Imports: of classes named in a configuration, `path.py:Class` or `module:Class`; and what the import of a large library need
not cost, which is libraries that are not used here, and searching for garbage where nothing is thrown away.

Invariant: a symbol is either returned as the kind that was asked for, or refused with what is there instead. A file is executed
once in a process, however often it is named, so that its classes keep their identity.

A relative path is looked for under each of `bases` in turn, then under NEXRL_PATH, where it is set, then in the working
directory.

The old name of a module that moved, in a stored run's configuration, is read as the new name (`MOVED`).

    load_class("evaluator.py:Exact", Evaluator, "environment.evaluator", ["recipes/quiz/agent_workspace"])
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from roundhouse.errors import ConfigError

T = TypeVar("T")

MOVED = {
    "roundhouse.gym.environments": "roundhouse.environments",
    "roundhouse.gym.environment": "roundhouse.environments.base",
    "roundhouse.gym.gymnasium": "roundhouse.environments.base",
    "roundhouse.gym.workers": "roundhouse.compat.nexrl",
}
"""Packages and modules whose classes configurations name, by the name that they had."""


def load_class(target: str, kind: type[T] | tuple[type[T], ...], key: str, bases: Sequence[str | Path] = ()) -> type[T]:
    """The class that `target` names.

    Args:
        kind: what it must be a subclass of; of one of them, if there are several.
        key: the configuration key, for the error.

    Raises:
        ConfigError: no such file, module or class, or it is no `kind`.
    """
    module, found = _named(target, key, bases, "Class")
    where, _, name = target.rpartition(":")
    if isinstance(found, type) and issubclass(found, kind):
        return found
    wanted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
    there = sorted(
        each
        for each, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kind) and not each.startswith("_")
    )
    what = f"has no {name}" if found is None else f"has a {name} that is no {wanted}"
    raise ConfigError(f"{key} is {target!r}: {where} {what}. There are: {', '.join(there) or f'no {wanted}'}.")


def load_function(target: str, key: str, bases: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """The function that `target` names; arguments as of `load_class`.

    Raises:
        ConfigError: no such file, module or function.
    """
    module, found = _named(target, key, bases, "function")
    if callable(found):
        return found
    where, _, name = target.rpartition(":")
    there = sorted(
        each for each, value in vars(module).items() if inspect.isfunction(value) and not each.startswith("_")
    )
    raise ConfigError(f"{key} is {target!r}: {where} has no function {name}. There are: {', '.join(there) or 'none'}.")


def _named(target: str, key: str, bases: Sequence[str | Path], what: str) -> tuple[ModuleType, object]:
    """The module, and what it has under the name: None where that is nothing."""
    where, separator, name = target.rpartition(":")
    if not separator or not where or not name:
        raise ConfigError(f"{key} is {target!r}: write path/to/file.py:{what} or package.module:{what}.")
    module = _file_module(where, key, bases) if where.endswith(".py") else _module(_moved(where), key)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return module, found


def add_import_path(directory: str | Path) -> None:
    """Let files of `directory` import each other by name; last, so that they hide nothing installed."""
    path = str(Path(directory).resolve())
    if path not in sys.path:
        sys.path.append(path)


def _moved(name: str) -> str:
    old = next((old for old in MOVED if name == old or name.startswith(f"{old}.")), None)
    return name if old is None else MOVED[old] + name.removeprefix(old)


def _hint(error: BaseException) -> str:
    """Where the modules are that a file of the user's still imports by their old names."""
    if not isinstance(error, ModuleNotFoundError) or not str(error.name).startswith("roundhouse.gym"):
        return ""
    return " These modules moved: " + ", ".join(f"{old} is {new}" for old, new in MOVED.items()) + "."


def _module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key}: importing {name} failed ({error}). Install the package, put its directory on PYTHONPATH, or name a file: "
            f"path/to/file.py:Class.{_hint(error)}"
        ) from error


def _file_module(path: str, key: str, bases: Sequence[str | Path]) -> ModuleType:
    file = find_file(path, key, bases)
    name = f"roundhouse_file_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file's own code ends here
        del sys.modules[name]
        raise ConfigError(f"{key}: {file} cannot be executed: {error!r}.{_hint(error)}") from error
    return module


def find_file(path: str, key: str, bases: Sequence[str | Path] = ()) -> Path:
    """The file that a relative or absolute path names.

    Raises:
        ConfigError: there is none; the text says what is there instead.
    """
    nexrl = [os.environ["NEXRL_PATH"]] if os.environ.get("NEXRL_PATH") else []
    tried = [Path(path)] if Path(path).is_absolute() else [Path(base) / path for base in (*bases, *nexrl, ".")]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    directory = next((candidate.parent for candidate in tried if candidate.parent.is_dir()), None)
    suffix = Path(path).suffix
    beside = sorted(file.name for file in directory.glob(f"*{suffix}")) if directory else []
    there = f" {directory} has: {', '.join(beside) or f'no {suffix} file'}." if directory else ""
    raise ConfigError(f"{key}: no file {path}; tried {', '.join(map(str, tried))}.{there}")


@contextmanager
def hide_packages(*names: str) -> Iterator[None]:
    """Within the block these packages seem not to be installed, unless they were imported before; afterwards all is as it was.

    For imports at a process's start, before there are threads that import. What an optional import decided in the block,
    it may remember for good.
    """
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None there means: no such module
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def gc_paused(*, stays: bool = True) -> Iterator[None]:
    """No garbage is looked for in the block: a fifth of the time that torch and transformers take to be imported.

    Args:
        stays: what the block makes lives as long as the process, so that garbage is never looked for again among what is there
            by then, and a full collection is shorter by that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stays:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def lean_transformers() -> Iterator[None]:
    """What is imported of transformers in the block does without three optional packages: scikit-learn, which tunes how far an
    assistant model drafts ahead; scipy, for the losses of models that detect objects; accelerate, which spreads a model over
    devices. They are a sixth of a trainer's imports and a quarter of an engine's.

    The modules that were imported in the block do without them for good. Everything else can import them.

    Where this is the first import of transformers, it does not read the metadata of all installed packages either: 0.7 s of CPU
    with 300 of them, to look up the versions of ten whose names it knows.
    """
    with gc_paused(stays=False), _distributions_by_need():
        from transformers import utils

    checks = ("is_sklearn_available", "is_scipy_available", "is_accelerate_available")
    found = {name: getattr(utils, name) for name in checks}
    for name in checks:
        setattr(utils, name, lambda *_, **__: False)
    try:
        with gc_paused(stays=False):  # a model may be made in the block, and go again
            yield
    finally:
        for name, check in found.items():
            setattr(utils, name, check)


class _Distributions(dict[str, list[str]]):
    """`metadata.packages_distributions()`, read when a package is asked for that no distribution is named after."""

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        super().__init__()
        self.read: Callable[[], Mapping[str, list[str]]] | None = read

    def get(self, package: str, default: Any = None) -> Any:
        if self.read is not None:
            try:
                return [metadata.distribution(package).name]
            except metadata.PackageNotFoundError:
                self.update(self.read())
                self.read = None
        return super().get(package, default)


@contextmanager
def _distributions_by_need() -> Iterator[None]:
    """What asks in the block which distributions there are, learns it by and by."""
    read = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions(read)
    try:
        yield
    finally:
        metadata.packages_distributions = read
