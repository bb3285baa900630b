"""Replays in a store: `replays/<name>/` has the directories of a run, and its `run.json` the request that it answers."""

from __future__ import annotations

from typing import Any

from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.store.lineage import Parent, first_draw_of, read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run


def replay_names(store: str) -> list[str]:
    """Names of the replays of a store."""
    return (Location(store) / "replays").names()


def load_replay(store: str, name: str) -> Run:
    """Load a replay as a run.

    Raises:
        StoreError: the replay does not exist; the text lists the existing ones.
    """
    location = Location(store) / f"replays/{name}"
    try:
        identity = read_identity(location)
    except NotFound:
        existing = ", ".join(replay_names(store)) or "none"
        raise StoreError(f"No replay {name!r} in {Location(store).uri}. Replays there: {existing}.") from None
    config = parse_config(identity["config"], origin=f"{location.uri}/run.json", recorded=True)
    parent = Parent.model_validate(identity["parent"])
    return Run(
        location,
        config,
        identity["uid"],
        identity["created_at"],
        identity["code_version"],
        parent,
        first_draw_of(identity),
    )


def request_of(replayed: Run) -> dict[str, Any]:
    """Return the request of a replay: the run, iterations, stages and substitutions."""
    return read_identity(replayed.location)["replay"]
