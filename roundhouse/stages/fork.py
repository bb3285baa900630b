"""Fork: a new run that goes on from an iteration of another.

Invariant: the parent is only read. The fork's configuration is the parent's but for what the person changed, so a fork without
changes makes the very versions that the parent made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundhouse.config.loading import apply_override, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import Run, load_run, no_such_version, open_run


def fork_config(
    store: str,
    run_id: str,
    new_id: str,
    at: int | None = None,
    overrides: Sequence[str] = (),
    keys: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The configuration of a fork.

    Args:
        at: the iteration (= policy version) to go on from; the newest when left out.
        keys: whole sections that take the place of the parent's, before the overrides.

    Raises:
        StoreError: there is no such run, or no such version of it.
        ConfigError: nothing left to train, an impossible override.
    """
    parent = load_run(store, run_id)
    versions = parent.checkpoint_versions()
    version = versions[-1] if at is None and versions else at
    if version is None or version not in versions:
        raise no_such_version(parent, version)
    tree = parent.config.model_dump(mode="json") | {
        "run_id": new_id,
        "store": store,
        "resume": {"mode": "from_path", "path": parent.checkpoint(version).location.uri},
        **(keys or {}),
    }
    for override in overrides:
        apply_override(tree, override)
    config = parse_config(tree, origin=f"fork of {run_id} at {version}")
    if config.iterations <= version:
        raise ConfigError(
            f"iterations is {config.iterations}, and the fork starts at version {version}: nothing is left to train. "
            f"Raise it: --set iterations={version + 10}."
        )
    return config


def fork_run(config: RunConfig) -> Run:
    """Create the fork with its checkpoints; the same call again returns it.

    Raises:
        ConfigError: a run of that id exists that is not this fork, or the checkpoint cannot be loaded with this configuration.
    """
    run = open_run(config)
    starting_policy(run)
    return run
