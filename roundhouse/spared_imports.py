"""Imports that a library makes for something that is not used here, and that a start cannot afford."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spared(*names: str) -> Iterator[None]:
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
