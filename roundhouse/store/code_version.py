"""The version of the code, as a manifest records it."""

from __future__ import annotations

import functools
from pathlib import Path

from roundhouse import __version__


@functools.cache
def code_version() -> str:
    """`0.1.0`, or `0.1.0+g1a2b3c4d5e6f` in a git checkout (the commit, without a look at uncommitted changes)."""
    git = Path(__file__).resolve().parents[2] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        commit = (git / head.removeprefix("ref: ")).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return __version__
    return f"{__version__}+g{commit[:12]}"
