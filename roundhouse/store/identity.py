"""A run's run.json: created once, and believed only while its configuration has the digest that was recorded with it."""

from __future__ import annotations

import json
from typing import Any

from roundhouse.config.loading import digest_of_tree
from roundhouse.errors import StoreError
from roundhouse.store.location import Location

IDENTITY = "run.json"


def read_identity(location: Location) -> dict[str, Any]:
    """The identity of the run in this directory.

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
    return identity
