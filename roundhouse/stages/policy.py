"""The starting policy: version 0 of every run, made or fetched once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

from roundhouse.config.training import ResidentService
from roundhouse.policy.starting import starting_policy_of
from roundhouse.stages.checkpoint import publish_starting_policy
from roundhouse.store import lease
from roundhouse.store.directories import checkpoint_cache, scratch_beside, take_over
from roundhouse.store.lineage import IDENTITY, adopt_checkpoints
from roundhouse.store.location import Location
from roundhouse.store.replays import load_replay, replay_names, request_of
from roundhouse.store.run import Run, load_run, state_of, trained_since_state
from roundhouse.store.stage import ModelFiles, Reference


def starting_policy(run: Run) -> Reference:
    """Commit the version that the run starts from, or return it: version 0, or the parent's version of a fork.

    Raises:
        ConfigError: the pretrained directory is missing, incomplete or damaged.
    """
    if run.parent is not None:
        return adopt_checkpoints(run, partial(_with_optimizer, run))
    if (reference := run.checkpoint(0).reference()) is not None:
        return reference
    with scratch_beside(run.checkpoint(0).location) as scratch:
        directory, details = starting_policy_of(run.config).make(run, scratch)
        return publish_starting_policy(run, directory, details, move=directory == scratch)


def _with_optimizer(fork: Run, origin: Reference, location: Location, attempt: str) -> ModelFiles:
    """Copy the parent's version. If it was published without the trainer's state, make the state again with the
    parent's configuration and sequences (`checkpoint.optimizer_every`)."""
    holder, since = trained_since_state(origin)
    if not since:
        state = state_of(holder)
        return take_over(origin, location, attempt, None if state == origin else state)
    from roundhouse.stages.train import write_with_optimizer

    assert fork.parent is not None, "only a fork adopts"
    parent = load_run(origin.uri.rsplit("/runs/", 1)[0], fork.parent.run_id)
    service = fork.config.train.service
    here = {"service": ResidentService() if service.runs_whole_steps else service}
    train = parent.config.train.model_copy(update=here | {"threads": fork.config.train.threads})
    machine = {"train": train, "infra": fork.config.infra, "placement": fork.config.placement}
    parent = replace(parent, config=parent.config.model_copy(update=machine))
    return write_with_optimizer(parent, origin, location, attempt, checkpoint_cache(fork.config), for_run=fork)


def delete_run(run: Run) -> None:
    """Delete a run.

    Invariant: nothing is deleted while another process drives the run. `run.json` is deleted when only the lease is
    left, so an interrupted deletion leaves a run that is listed and can be deleted again. Nothing outside the directory
    needs it: a fork owns its checkpoints, a dataset its rows. The engine's copy of its tokenizer on this machine is
    deleted, too.

    Raises:
        RunDriven: a process drives it.
    """
    lease.take(run.location)
    for name in run.location.tree():
        if name != IDENTITY and not name.startswith(f"{lease.DIRECTORY}/"):
            run.location.delete_object(name)
    run.location.delete_object(IDENTITY)
    run.location.delete_tree()
    shutil.rmtree(checkpoint_cache(run.config) / f"engine-{run.uid}", ignore_errors=True)


def delete_replays_of(run: Run) -> list[str]:
    """Delete the replays of a run, which mean nothing without it, and return their names.

    Raises:
        RunDriven: a process drives one of them.
    """
    replays = [load_replay(run.config.store, name) for name in replay_names(run.config.store)]
    own = [replayed for replayed in replays if request_of(replayed)["run_uid"] == run.uid]
    for replayed in own:
        delete_run(replayed)
    return [replayed.location.uri.rsplit("/", 1)[-1] for replayed in own]
