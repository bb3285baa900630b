"""What an import need not cost: libraries that are not used here, and searching for garbage where nothing is thrown away."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any


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
