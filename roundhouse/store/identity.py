"""A run's run.json: created once, and valid only while its configuration has the digest that was recorded with it; and the
version of the code, as run.json and manifests record it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from roundhouse import __version__
from roundhouse.config.loading import digest_of_tree
from roundhouse.config.renamed import translated
from roundhouse.errors import StoreError
from roundhouse.store.location import Location

IDENTITY = "run.json"


def read_identity(location: Location) -> dict[str, Any]:
    """The identity of the run in this directory, its configuration under today's names.

    Raises:
        NotFound: there is no run.
        StoreError: it is damaged, or its configuration is not the one that the run was created with.
    """
    data, place = location.read(IDENTITY), f"{location.uri}/{IDENTITY}"
    try:
        identity: dict[str, Any] = json.loads(data)
        found, recorded = digest_of_tree(identity["config"]), identity["config_digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{place} is damaged: {error!r}. Restore it from a copy.") from error
    if found != recorded:
        raise StoreError(
            f"{place}: its configuration has the digest {found}, and the run was created with {recorded}: somebody has edited "
            "it. Restore it from a copy. A run goes on with other settings by --set, or as a fork."
        )
    return identity | {"config": translated(identity["config"])}


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
