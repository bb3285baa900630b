"""Fork: a new run that continues from an iteration of another.

Invariant: the parent is only read. The fork's configuration is the parent's with the user's changes, so a fork without
changes makes exactly the parent's versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roundhouse.config.algorithms import UNCORRECTED
from roundhouse.config.loading import apply_override, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.stages.policy import starting_policy
from roundhouse.store.location import Location
from roundhouse.store.run import Run, load_run, no_such_version, open_run, run_exists, version_named


def fork_config(
    store: str,
    run_id: str,
    new_id: str,
    at: int | None = None,
    overrides: Sequence[str] = (),
    keys: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the configuration of a fork: its parent's with the changes. A fork that owns its starting checkpoint keeps
    its own configuration, whatever happened to the parent.

    Args:
        at: iteration (= policy version) to continue from; by default the fork's start or the parent's newest version.
        keys: whole sections that replace the recorded ones, before the overrides.

    Raises:
        StoreError: the run or its version does not exist.
        ConfigError: nothing left to train, an impossible override.
    """
    source, version = _source(store, run_id, new_id, at)
    tree = source.config.model_dump(mode="json") | {
        "run_id": new_id,
        "store": store,
        "resume": {"mode": "from_path", "path": _checkpoint_uri(store, run_id, version)},
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


Method = Literal["grpo", "rejection", "sft", "distillation"]


def offline_config(
    store: str,
    run_id: str,
    new_id: str,
    datasets: Sequence[str],
    method: Method = "grpo",
    at: str = "newest",
    *,
    teacher: str | None = None,
    reward_threshold: float | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Return the configuration of an offline run; if `fork_config` takes the run's own, that one.

    Args:
        at: starting checkpoint: `newest`, `promoted` or a version. The first two are resolved once, when the offline
            run is made.
        method: grpo keeps the run's policy-gradient algorithm, with truncated importance weights; rejection learns the
            best rollout of each group that reaches the threshold; sft learns all rows; distillation needs a teacher.
        overrides: applied last.

    Raises:
        StoreError: the run does not exist.
        ConfigError: the checkpoint is missing, or settings do not fit the method.
    """
    start = int(at) if at.isdecimal() else None
    if start is None and fork_of(store, run_id, new_id) is None:
        start = version_named(load_run(store, run_id), at)
    source, version = _source(store, run_id, new_id, start)
    keys = {
        "offline": {"datasets": list(datasets)},
        "train": source.config.train.model_dump(mode="json")
        | {"algorithm": _algorithm(source.config, method, teacher, reward_threshold)},
        "iterations": version + 1,  # does not count: epochs do
    }
    return fork_config(store, run_id, new_id, version, overrides, keys)


def fork_of(store: str, parent_id: str, run_id: str) -> Run | None:
    """Return the run if it was forked from a version of that parent, else None."""
    run = load_run(store, run_id) if run_exists(store, run_id) else None
    if run is None or run.parent is None:
        return None
    return run if run.parent.checkpoint.uri == _checkpoint_uri(store, parent_id, run.parent.version) else None


def _source(store: str, parent_id: str, run_id: str, at: int | None) -> tuple[Run, int]:
    """Return the run that supplies a fork's configuration, and the starting version: the fork itself if it owns that
    version, else its parent."""
    if (fork := fork_of(store, parent_id, run_id)) is not None:
        at = fork.first_version if at is None else at
        if at == fork.first_version and fork.checkpoint(at).reference() is not None:
            return fork, at
    parent = load_run(store, parent_id)
    versions = parent.checkpoint_versions()
    version = versions[-1] if at is None and versions else at
    if version is None or version not in versions:
        raise no_such_version(parent, version)
    return parent, version


def _checkpoint_uri(store: str, run_id: str, version: int) -> str:
    return (Location(store) / f"runs/{run_id}/checkpoints/{version:06d}").uri


def _algorithm(config: RunConfig, method: Method, teacher: str | None, threshold: float | None) -> dict[str, Any]:
    if (teacher is not None) != (method == "distillation"):
        raise ConfigError(
            f"teacher is {teacher!r} and the method {method}: a teacher goes with distillation, and distillation needs one. "
            "Give the directory of a model, such as another run's checkpoint."
        )
    if threshold is not None and method != "rejection":
        raise ConfigError(f"reward_threshold is {threshold:g}, which only the method rejection reads. Leave it out.")
    if method == "distillation":
        return {"kind": "distillation", "teacher": teacher}
    if method == "sft":
        return {"kind": "cross_entropy", "select": "all"}
    if method == "rejection":
        return {
            "kind": "cross_entropy",
            "select": "best_of_group",
            "reward_threshold": 1.0 if threshold is None else threshold,
        }
    # The run's algorithm, else GRPO, with truncated importance weights unless it has a correction
    own = config.train.algorithm.model_dump(mode="json", exclude_unset=True)
    kind = config.train.algorithm.kind
    if kind in ("cross_entropy", "distillation"):
        own, kind = {}, "grpo"
    if own.get("mismatch_correction", "none") in UNCORRECTED:
        own |= {"mismatch_correction": "tis"}
    if config.train.algorithm.kl_coefficient > 0 and config.train.algorithm.kl_placement == "loss":
        own |= {"kl_importance_weighting": True}
    return own | {"kind": kind}
