"""Digests of user code: files and packages that a configuration names.

Invariant: a digest changes if the named module, or one below its directory (its top package's) that it imports, changes.
Nothing is imported, and nothing is executed. An installed package has the version of its distribution.

    env.py:World (imports helpers, numpy)     sha256 of env.py and helpers.py
    my_package.env:World, editable            sha256 of my_package/env.py and the modules of my_package that it imports
    my_package.env:World, installed           my-package 1.2.0
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from roundhouse.errors import ConfigError
from roundhouse.imports import find_file

SHOWN = 16
"""Hexadecimal digits of a digest that are recorded."""


def digest_of_target(target: str, key: str, bases: Sequence[str | Path] = ()) -> str | None:
    """Return the digest of the code that `path.py:Name` or `module:Name` names; None for Roundhouse's own and unknown code.

    Args:
        key: the configuration key, for errors.
        bases: directories in which a relative path is looked for first.
    """
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        try:
            file = find_file(place, key, bases)
            return digest_of_files(_with_imports(file, file.parent))
        except ConfigError:
            return None  # the loader reports a missing file
    if place.partition(".")[0] == __name__.partition(".")[0]:
        return None
    return _digest_of_package(place)


def digest_of_files(files: Iterable[Path]) -> str:
    """Return one digest of these files' contents, in the order of their names."""
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return f"sha256 {total.hexdigest()[:SHOWN]}"


def _with_imports(file: Path, root: Path) -> set[Path]:
    """Return the file and the modules below `root` that it imports, directly or by one of them."""
    files, unread = {file}, [file]
    while unread:
        for part in _imported_places(unread.pop(), root):
            for candidate in (part.with_suffix(".py"), part / "__init__.py"):
                if candidate.is_file() and candidate not in files:
                    files.add(candidate)
                    unread.append(candidate)
    return files


def _imported_places(file: Path, root: Path) -> set[Path]:
    """Return the paths, without ending, at which the modules that a file imports would be, and their packages."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()  # the loader reports it
    places: set[Path] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places |= {each for alias in node.names for each in _places(root, alias.name)}
        elif isinstance(node, ast.ImportFrom):
            base = root if node.level == 0 else file.parents[node.level - 1]
            names = [node.module or "", *(f"{node.module or ''}.{alias.name}" for alias in node.names)]
            places |= {each for name in names for each in _places(base, name)}
    return places


def _places(base: Path, name: str) -> list[Path]:
    """Return the path of a module below `base` and those of its packages."""
    parts = [part for part in name.split(".") if part]
    return [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]


def _digest_of_package(module: str) -> str | None:
    name = module.partition(".")[0]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    try:
        distribution = metadata.distribution(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        distribution = None
    if distribution is not None and "site-packages" in Path(spec.origin).parts:
        return f"{distribution.name} {distribution.version}"
    root = Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]
    place = _places(root, module)[-1]
    files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return digest_of_files(_with_imports(files[0], root)) if files else None
