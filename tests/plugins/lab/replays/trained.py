"""A recorded run of a few iterations: a tiny policy that collects for itself and is trained on it, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainer_home import release_trainers
from roundhouse.stages.validate import validate_iteration, vocabulary_size
from roundhouse.store.directories import checkpoint_cache
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, StageKind
from roundhouse.trajectories.records import Ledger, Rollout, derive_seed
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.stages import offline_world

Draw = Callable[[Run, Reference, int, torch.Generator], list[Rollout]]
"""From (run, weights, iteration, source of chance) to the rollouts of the iteration."""


def own_samples(run: Run, base: Reference, k: int, generator: torch.Generator) -> list[Rollout]:
    """Rollouts of a token or four, with reward for a low first one."""
    model, size = offline_world.model_of(base), run.config.rollout.group_size
    groups = range(run.config.rollout.prompts_per_iteration)
    return [
        rollout
        for group in groups
        for rollout in offline_world.sampled_group(model, group, size, base.policy_version, k, generator)
    ]


def trained_run(
    directory: Path, iterations: int = 3, run_id: str = "base", draw: Draw = own_samples, **keys: Any
) -> Run:
    """A run with so many iterations on record."""
    run = open_run(offline_world.make_config(directory, run_id, iterations=iterations, **keys))
    base = starting_policy(run)
    cache = checkpoint_cache(run.config)
    for k in range(1, iterations + 1):
        sequences = validate_iteration(run, k, collect(run, k, base, draw), vocabulary_size(run))
        base = publish(run, train_iteration(run, k, sequences, base, cache))
    release_trainers()
    return run


def collect(run: Run, k: int, base: Reference, draw: Draw) -> Reference:
    """The rollouts of an iteration, drawn from the weights of `base`."""
    attempt = run.begin(run.stage(k, StageKind.COLLECT), policy_version=base.policy_version)
    made = draw(run, base, k, torch.Generator().manual_seed(derive_seed("collect", k)))
    attempt.write_table("turns", turns_table(made))
    attempt.write_table("rollouts", rollouts_table(made))
    ledger = Ledger.from_rollouts(made, requested=len(made))
    return attempt.commit(inputs={"weights": base}, counts=ledger.counts(), details={"sampling": {"temperature": 1.0}})
