"""Inputs of a run that its configuration only names: task rows and user code, by their digests.

Invariant: a run is continued with the inputs that are on record. As soon as rollouts were made from them, a start with other
inputs is refused, or recorded with the time and both digests (`resume.changed_inputs`). A run without a record, of an older
version, gets one at its next start.

    runs/<run>/run.json       "inputs": {"environment.target": "sha256 1f…", "environment: training tasks": "12 rows, sha256 …"}
    runs/<run>/inputs.json    the same after a change that was accepted, and the changes
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from roundhouse.errors import ConfigError
from roundhouse.store.location import Location, NotFound

Inputs = Mapping[str, str]
"""A text with a digest, by the key or part of the configuration that names the input."""
INPUTS = "inputs"
"""In an identity."""
RECORD = "inputs.json"


def recorded_inputs(location: Location, first: Inputs | None) -> Inputs | None:
    """Return the newest inputs on record of the run in this directory; None without a record.

    Args:
        first: the inputs in its run.json.
    """
    return _record(location, first)["inputs"]


def accepted_changes(location: Location) -> list[dict[str, Any]]:
    """Return the changes of inputs with which the run was continued, oldest first."""
    return _record(location, None)["changes"]


def digest_of_inputs(inputs: Inputs) -> str:
    """Return one digest of all inputs, for manifests."""
    return hashlib.sha256(json.dumps(dict(inputs), sort_keys=True).encode()).hexdigest()[:16]


def settle_inputs(location: Location, first: Inputs | None, inputs: Inputs, run_id: str, *, accept: bool) -> None:
    """Compare a start's inputs with those on record, and record them if they are new or accepted.

    Inputs that only one of the two knows are not compared: a machine may not have all files.

    Raises:
        ConfigError: an input has changed, and `accept` is False; names each with both digests.
    """
    record = _record(location, first)
    known = record["inputs"] or {}
    changed = {
        key: (known[key], inputs[key]) for key in sorted(known.keys() & inputs.keys()) if known[key] != inputs[key]
    }
    matters = bool(changed) and _has_rollouts(location)
    if matters and not accept:
        lines = "\n".join(f"  {key}: {before} -> {after}" for key, (before, after) in changed.items())
        raise ConfigError(
            f"Run {run_id!r} exists, and its inputs have changed since:\n{lines}\n"
            "Iterations before and after the change would not be comparable. Restore the files, start a new run with "
            "--set run_id=<another name>, or continue with --set resume.changed_inputs=accept, which is recorded."
        )
    if changed or record["inputs"] is None:
        changes = [{"at": time.time(), "changed": changed}] if matters else []
        record = {"inputs": {**known, **inputs}, "changes": [*record["changes"], *changes]}
        location.write(RECORD, (json.dumps(record, indent=1) + "\n").encode())


def _has_rollouts(location: Location) -> bool:
    """Return whether a stage with rollouts was begun."""
    stages = (name for k in (location / "iterations").names() for name in (location / f"iterations/{k}").names())
    return any(name.startswith(("collect", "generate", "evaluate")) for name in stages)


def _record(location: Location, first: Inputs | None) -> dict[str, Any]:
    try:
        return json.loads(location.read(RECORD))
    except NotFound:
        return {"inputs": first, "changes": []}
