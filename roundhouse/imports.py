"""Imports of classes named in a configuration (`path.py:Class` or `module:Class`), and faster imports of large
libraries.

Invariant: a symbol is returned as the requested kind, or refused with the existing alternatives. A file is executed
once in a process, however often it is named, so its classes keep their identity.

A relative path is looked up under each of `bases` in turn, then under NEXRL_PATH, if set, then in the working
directory. The old name of a moved module in a stored run's configuration is read as the new name (`MOVED`). A
foreign package that is not installed is replaced by a module here that has its names (`ForeignNames`).

    load_class("evaluator.py:Exact", Evaluator, "environment.evaluator", ["recipes/quiz/agent_workspace"])
"""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from roundhouse import plugins
from roundhouse.errors import ConfigError

T = TypeVar("T")

_EXAMPLES = ("bug_fix", "code", "frozen_lake", "search", "short_questions", "sql_world", "terminal", "warehouse")
MOVED = {
    **{f"roundhouse.environments.{name}": f"roundhouse.plugins.example_environments.{name}" for name in _EXAMPLES},
    "roundhouse.gym.environments": "roundhouse.environments",
    "roundhouse.gym.environment": "roundhouse.environments.base",
    "roundhouse.gym.gymnasium": "roundhouse.environments.base",
    "roundhouse.gym.workers": "roundhouse.plugins.nexrl",
    "roundhouse.compat.command": "roundhouse.plugins.programs.command",
    "roundhouse.compat": "roundhouse.plugins",
    "roundhouse.programs": "roundhouse.plugins.programs",
    "roundhouse.replays": "roundhouse.plugins.lab.replays",
    "roundhouse.simulation": "roundhouse.plugins.lab.simulation",
    "roundhouse.weight_sync.delta": "roundhouse.plugins.delta.transport",
    "roundhouse.config.simulation": "roundhouse.plugins.lab.simulation.scenario",
}
"""Moved packages and modules that configurations and files of users name, by their old names."""


class ForeignNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a foreign package that is not installed, the last of all finders."""

    def __init__(self, package: str, modules: Collection[str], names: str) -> None:
        self.package = package
        self._modules = modules
        self._names = names

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self.package and fullname not in self._modules:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        names = importlib.import_module(self._names)
        module.__getattr__ = functools.partial(getattr, names)  # type: ignore[method-assign]


def provide_foreign_names(package: str, modules: Collection[str], names: str) -> None:
    """Let code of users import from a foreign package, also if it is not installed.

    Args:
        modules: the package's modules.
        names: module here that has their names.
    """
    if not any(isinstance(finder, ForeignNames) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.append(ForeignNames(package, modules, names))


def load_class(target: str, kind: type[T] | tuple[type[T], ...], key: str, bases: Sequence[str | Path] = ()) -> type[T]:
    """Load the class of `target`.

    Args:
        kind: required base class, or one of several.
        key: the configuration key, for the error.

    Raises:
        ConfigError: the file, module or class does not exist, or is not a `kind`.
    """
    module, symbol = _named(target, key, bases, "Class")
    where, _, name = target.rpartition(":")
    if isinstance(symbol, type) and issubclass(symbol, kind):
        return symbol
    kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
    existing = sorted(
        each
        for each, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kind) and not each.startswith("_")
    )
    what = f"has no {name}" if symbol is None else f"has a {name}, which is not of type {kinds}"
    raise ConfigError(f"{key} is {target!r}: {where} {what}. Available: {', '.join(existing) or f'no {kinds}'}.")


def load_function(target: str, key: str, bases: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """The function that `target` names; arguments as of `load_class`.

    Raises:
        ConfigError: no such file, module or function.
    """
    module, symbol = _named(target, key, bases, "function")
    if callable(symbol):
        return symbol
    where, _, name = target.rpartition(":")
    existing = sorted(
        each for each, value in vars(module).items() if inspect.isfunction(value) and not each.startswith("_")
    )
    raise ConfigError(
        f"{key} is {target!r}: {where} has no function {name}. Available: {', '.join(existing) or 'none'}."
    )


def _named(target: str, key: str, bases: Sequence[str | Path], what: str) -> tuple[ModuleType, object]:
    """Return the module, and its object of this name, or None."""
    where, separator, name = target.rpartition(":")
    if not separator or not where or not name:
        raise ConfigError(f"{key} is {target!r}: write path/to/file.py:{what} or package.module:{what}.")
    plugins.names("environment")  # the folders of plug-ins provide names of foreign packages
    module = _file_module(where, key, bases) if where.endswith(".py") else _module(_moved(where), key)
    symbol: object = module
    for part in name.split("."):
        symbol = getattr(symbol, part, None)
    return module, symbol


def add_import_path(directory: str | Path) -> None:
    """Let files of `directory` import each other by name; last, so that they hide nothing installed."""
    path = str(Path(directory).resolve())
    if path not in sys.path:
        sys.path.append(path)


def _moved(name: str) -> str:
    old = next((old for old in MOVED if name == old or name.startswith(f"{old}.")), None)
    return name if old is None else _moved(MOVED[old] + name.removeprefix(old))


def _hint(error: BaseException) -> str:
    """Return the new places of modules that a user's file imports by their old names."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    name = f"{error.name}."
    moved = [old for old in MOVED if f"{old}.".startswith(name) or name.startswith(f"{old}.")]
    return f" These modules moved: {', '.join(f'{old} is {MOVED[old]}' for old in moved)}." if moved else ""


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
    """Return the file of a relative or absolute path.

    Raises:
        ConfigError: it does not exist; the text lists the alternatives.
    """
    nexrl = [os.environ["NEXRL_PATH"]] if os.environ.get("NEXRL_PATH") else []
    tried = [Path(path)] if Path(path).is_absolute() else [Path(base) / path for base in (*bases, *nexrl, ".")]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    directory = next((candidate.parent for candidate in tried if candidate.parent.is_dir()), None)
    suffix = Path(path).suffix
    beside = sorted(file.name for file in directory.glob(f"*{suffix}")) if directory else []
    existing = f" {directory} has: {', '.join(beside) or f'no {suffix} file'}." if directory else ""
    raise ConfigError(f"{key}: no file {path}; tried {', '.join(map(str, tried))}.{existing}")


@contextmanager
def hide_packages(*names: str) -> Iterator[None]:
    """Hide these packages during the block, unless they are imported already.

    For imports at a process's start, before other threads import. A decision of an optional import in the block may be
    permanent.
    """
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None there means: no such module
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def kind_package(kind: str, version: str) -> Any:
    """Import the package of an environment's kind.

    Args:
        kind: `environment.kind` and the package's module; with hyphens, its distribution and the extra of Roundhouse.
        version: beginning of the supported versions, such as `0.7.`.

    Raises:
        ConfigError: the package cannot be imported, or has another version.
    """
    name = kind.replace("_", "-")
    remedy = f"pip install 'roundhouse[{name}]'"
    try:
        package = importlib.import_module(kind)
    except ImportError as error:
        raise ConfigError(
            f"environment.kind is {kind}, but the package {name} cannot be imported ({error}): {remedy}."
        ) from error
    if not (present := metadata.version(name)).startswith(version):
        raise ConfigError(f"environment.kind is {kind}, which needs {name} {version}x, not {present}: {remedy}.")
    return package


TORCH_EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages with libraries that are compiled for one build of torch. vLLM requires all three. If
they are installed, transformers and vLLM import them for text models, too."""


_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
"""Compiled operators that torchvision looks up on import, for detectors of objects."""


@functools.cache
def broken_torch_extensions() -> dict[str, str]:
    """Import torch's extensions, hide the broken ones from this process, and return their errors by name.

    PyPI has builds for CUDA, which fail with a torch for CPU. A hidden package looks as if it were not installed, which
    text models do not notice. Without this call, transformers fails and blames a class of a model. A torchvision that
    lacks only its compiled library is imported without it: transforms of images do not use it.
    """
    broken = {}
    for name in TORCH_EXTENSIONS:
        if not _is_installed(name):
            continue
        try:
            _import_extension(name)
        except Exception as error:  # noqa: BLE001 - a broken library ends in any kind
            if name == "torchcodec" and isinstance(error, RuntimeError):
                continue  # FFmpeg is missing, which vLLM and transformers expect
            broken[name] = " ".join(f"{type(error).__name__}: {error}".split())
            _forget_submodules(name)
            sys.modules[name] = None  # type: ignore[assignment]  # None there means: no such module
    if broken and (checks := sys.modules.get("transformers.utils.import_utils")):
        for check, function in vars(checks).items():
            if check.startswith(tuple(f"is_{name}" for name in broken)):
                function.cache_clear()  # transformers remembers that it has seen the package
    return broken


def _import_extension(name: str) -> None:
    try:
        importlib.import_module(name)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        import torch

        _forget_submodules(name)
        for operator in _OPERATORS:
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(f"torchvision::{operator}", _SIGNATURE)
        importlib.import_module(name)


def _forget_submodules(name: str) -> None:
    for module in [each for each in sys.modules if each.startswith(f"{name}.")]:
        del sys.modules[module]


def lacks_compiled_operators() -> bool:
    """Return whether this process has imported a torchvision without its compiled library."""
    extension = sys.modules.get("torchvision.extension")
    return extension is not None and not extension._has_ops()


_IN_CHILDREN = """
import sys
from importlib import machinery, util


class Declaring:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch import library

            for operator in {operators!r}:
                library.define("torchvision::" + operator, {signature!r})


sys.modules.update(dict.fromkeys({names!r}))
if {declare!r}:
    sys.meta_path.insert(0, Declaring())
elsewhere = [each for each in sys.path if each != {directory!r}]
if (spec := machinery.PathFinder.find_spec("sitecustomize", elsewhere)) is not None:
    spec.loader.exec_module(util.module_from_spec(spec))
"""


@functools.cache
def mend_extensions_of_children(names: tuple[str, ...], declare: bool) -> None:
    """Prepare the Python processes that this process starts from now on, by a `sitecustomize` before all others.

    Args:
        names: packages to hide.
        declare: let torchvision be imported without its compiled library.
    """
    directory = tempfile.mkdtemp(prefix="roundhouse-hidden-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    text = _IN_CHILDREN.format(
        names=names, declare=declare, operators=_OPERATORS, signature=_SIGNATURE, directory=directory
    )
    Path(directory, "sitecustomize.py").write_text(text)
    paths = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def extensions_remedy(names: Iterable[str]) -> str:
    """Return the commands that mend an installation with these extensions of another build of torch."""
    names, build = list(names), metadata.version("torch").partition("+")[2]
    versions = " ".join(f"{name}=={metadata.version(name).partition('+')[0]}" for name in names)
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return (
        f"Text models need none of them: pip uninstall {' '.join(names)}. Or install the builds for this torch: pip install "
        f"--force-reinstall --no-deps {versions}{index}"
    )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a specification: a stand-in
        return False


@contextmanager
def late_classes(*targets: str) -> Iterator[None]:
    """Import the modules of these classes (`module:Class`) when an object is made, for code that the block imports.

    A class is left as it is if its module is already imported.
    """
    late = [(*target.split(":"),) for target in targets if target.partition(":")[0] not in sys.modules]
    for module, name in late:
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], name, _LateClass(name, (), {"__module__": module}))
    try:
        yield
    finally:
        for module, _ in late:
            del sys.modules[module]


class _LateClass(type):
    """A class that stands for the one of the same name in its module."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return getattr(importlib.import_module(cls.__module__), cls.__name__)(*arguments, **keywords)

    def __getattr__(cls, name: str) -> Any:
        return getattr(getattr(importlib.import_module(cls.__module__), cls.__name__), name)


@contextmanager
def gc_paused(*, stays: bool = True) -> Iterator[None]:
    """Pause garbage collection in the block, which takes a fifth of the import time of torch and transformers.

    Args:
        stays: objects made in the block live as long as the process, so later collections skip all present objects and
            are faster.
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
def lean_transformers(*, models: bool = True) -> Iterator[None]:
    """Import transformers in the block without three optional packages: scikit-learn (tuning of assistant models),
    scipy (losses of object detectors) and accelerate (models over several devices). They are a sixth of a trainer's
    imports and a quarter of an engine's.

    Modules imported in the block never use them. All others can import them. Extensions of torch that cannot be
    imported are hidden from the whole process (`broken_torch_extensions`).

    Args:
        models: the block imports models or their configurations, and thus torch and its extensions.

    If this is the first import of transformers, it does not read the metadata of all installed packages either: 0.7 s
    of CPU with 300 of them, for the versions of ten known ones.
    """
    with gc_paused(stays=False), _distributions_by_need():
        if models:
            broken_torch_extensions()
        from transformers import utils

    checks = ("is_sklearn_available", "is_scipy_available", "is_accelerate_available")
    originals = {name: getattr(utils, name) for name in checks}
    for name in checks:
        setattr(utils, name, lambda *_, **__: False)
    try:
        with gc_paused(stays=False):  # a model may be made in the block, and go again
            yield
    finally:
        for name, check in originals.items():
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
    """Look up distributions on demand in the block."""
    read = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions(read)
    try:
        yield
    finally:
        metadata.packages_distributions = read
