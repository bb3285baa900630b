"""What can be known of a run before anything is started: before its first record is in the store, before services and engine.

Invariant: these checks only read, and refuse nothing that a later stage would take. They raise what that stage would raise,
with the key or option at fault; what only a service can know is left to it.
"""

from __future__ import annotations

import os

from roundhouse.config.environments import CustomEnvironment, WorkerEnvironment
from roundhouse.config.models import PretrainedPolicy, RunConfig
from roundhouse.config.remote_environments import AgentEnvironment, RemoteEnvironment
from roundhouse.environments import class_of
from roundhouse.errors import ConfigError, StoreError
from roundhouse.policy.model_directory import check_model_directory
from roundhouse.policy.warm_start import refuse_without_demonstrations
from roundhouse.rollout.clients import open_environment
from roundhouse.stages.evaluate import no_heldout_task
from roundhouse.store.location import Location
from roundhouse.store.manifest import MANIFEST, model_location
from roundhouse.store.promoted import version_named
from roundhouse.store.run import load_run, no_such_version, run_exists, run_ids


def refuse_unready(config: RunConfig, *, remote: bool = True) -> None:
    """Refuse a run whose store, environment, held-out tasks, starting policy or datasets cannot be had.

    Args:
        remote: look into buckets, too. A dry run asks nothing outside this machine.

    Raises:
        ConfigError: names the key and the remedy.
    """
    if Location(config.store).is_local:
        directory = Location(config.store).local_path
        there = next(place for place in (directory, *directory.parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is no directory"
            raise ConfigError(f"store is {directory}, but {there} {why}. Set store to a place that can be written to.")
    evaluation, offline = config.evaluation, config.offline
    evaluates = (offline is None or offline.evaluate) and (evaluation.every is not None or evaluation.before_training)
    if not _has_tasks(config, remote) and evaluates:
        raise no_heldout_task(config)
    reachable = remote or Location(config.store).is_local
    if reachable and (Location(config.store) / f"runs/{config.run_id}/checkpoints/000000").exists(MANIFEST):
        return  # it has what it begins with
    if config.resume.path is None:
        _starting_policy(config, remote)
    if config.offline is not None and reachable:
        from roundhouse.stages.offline import find_datasets

        find_datasets(config.store, config.offline.datasets)


def refuse_no_checkpoint(config: RunConfig, version: int | None, *, promoted: bool = False) -> None:
    """Refuse to evaluate a checkpoint, or to collect with one, that is not there. The starting policy of a run that has not
    begun is asked for by its number, 0, and is made then.

    Raises:
        StoreError: no such run, or no such version of it.
        ConfigError: nothing is promoted.
    """
    if not run_exists(config.store, config.run_id):
        if version != 0:
            there = ", ".join(run_ids(config.store)) or "none"
            raise StoreError(
                f"No run {config.run_id!r} in {Location(config.store).uri}. Runs there: {there}. Train it first, or name its "
                "starting policy, which is made then: --version 0."
            )
        refuse_unready(config)
        return
    run = load_run(config.store, config.run_id)
    if promoted:
        version = version_named(run, "promoted")
    begins = version == run.first_version and run.latest_checkpoint() is None
    if version is not None and not begins and run.checkpoint(version).reference() is None:
        raise no_such_version(run, version)


def _has_tasks(config: RunConfig, remote: bool) -> bool:
    """Whether there are held-out tasks. Reads the files of rows and makes the class of a custom environment."""
    environment = config.environment
    if isinstance(environment, CustomEnvironment):
        return any(True for _ in open_environment(environment).tasks("heldout"))
    if isinstance(environment, AgentEnvironment | RemoteEnvironment):
        rows = (environment.train_tasks, environment.heldout_tasks)
    elif isinstance(environment, WorkerEnvironment):
        rows = (environment.train_data, environment.heldout_data)
    else:
        return getattr(environment, "heldout_fraction", 1) > 0
    if remote or not any("://" in (uri or "") for uri in rows):
        return any(True for _ in open_environment(environment).tasks("heldout"))
    return rows[1] is not None


def _starting_policy(config: RunConfig, remote: bool) -> None:
    if not isinstance(config.policy, PretrainedPolicy):
        refuse_without_demonstrations(class_of(config.environment))
        return
    source = model_location(Location(config.policy.path))
    if source.is_local:
        check_model_directory(source.local_path)
    elif remote and not source.exists("config.json"):
        raise ConfigError(f"policy.path is {source.uri}: it holds no config.json. Give a Hugging Face model directory.")
