"""What an import need not cost: libraries that are not used here, and searching for garbage where nothing is thrown away."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
def gc_paused() -> Iterator[None]:
    """The block makes what stays: no garbage is looked for meanwhile, and never again among what is there by then.

    A tenth of the time that a large library takes to be imported, and a full collection later is shorter by what it holds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def without_sklearn() -> Iterator[None]:
    """What is imported of transformers in the block takes no metric from scikit-learn, which brings scipy and pandas: a sixth
    of a trainer's imports. The metric tunes how far an assistant model drafts ahead; that stays fixed then.
    """
    from transformers import utils

    found = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        yield
    finally:
        utils.is_sklearn_available = found
