"""A scenario from what a run recorded: durations of its rollouts and stages.

Rollouts' seconds are those that were measured under the run's own load; the scenario repeats them whatever the number of slots,
so it tells how modes and replicas compare at about that load, not how an engine slows down beyond it. What an iteration took
beside refit and its rollouts in their slots (opening the environment, validate, train, report, …) counts as training: in `sync`
the simulated iteration is as long as the recorded one, by construction.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from roundhouse.errors import StoreError
from roundhouse.stages.report import iteration_manifests
from roundhouse.store.manifest import Manifest
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_table
from roundhouse.trajectories.records import Status

NEEDED = (StageKind.REFIT, StageKind.COLLECT, StageKind.REPORT)
BESIDE = (StageKind.EVALUATE, StageKind.PROMOTE)
"""Stages that a simulated iteration does not have."""


@dataclass(frozen=True, slots=True)
class RecordedIteration:
    """Seconds of one iteration."""

    wall: float
    """From one report to the next, without evaluation."""
    refit: float
    training: float
    """Everything that is neither refit nor rollouts in their slots: validate, train, checkpoint, report, …"""
    rollouts: list[float]
    failed: int


def recorded_iterations(run: Run, since: int = 1) -> list[RecordedIteration]:
    """The reported iterations of a run, from `since` on.

    Raises:
        StoreError: it has none.
    """
    found = [
        _iteration(run, iteration, manifests)
        for iteration in range(since, run.config.iterations + 1)
        if all(kind in (manifests := iteration_manifests(run, iteration)) for kind in NEEDED)
    ]
    if not found:
        raise StoreError(
            f"{run.location.uri} has no reported iteration: there is nothing to draw durations from. Let the run finish one, "
            "or give distributions with --config."
        )
    return found


def recorded_scenario(run: Run, since: int = 1) -> dict[str, Any]:
    """The tree of a `Scenario` with the run's plan, rollout seconds and stage seconds.

    Args:
        since: the first iteration that counts: a process' own first one holds imports, too.

    Raises:
        StoreError: nothing is recorded, or the run collected in rounds.
    """
    if run.config.rollout.dynamic_sampling is not None:
        raise StoreError(
            f"Run {run.run_id} has rollout.dynamic_sampling: it collected in rounds, which a simulated iteration does not "
            "have. Name a run without it, or give distributions with --config."
        )
    iterations, config = recorded_iterations(run, since), run.config
    count = sum(len(iteration.rollouts) for iteration in iterations)
    failed = sum(iteration.failed for iteration in iterations)
    return {
        "seed": config.seed,
        "iterations": config.iterations,
        "groups": config.rollout.prompts_per_iteration,
        "group_size": config.rollout.group_size,
        "rollout": {"kind": "recorded-iterations", "iterations": [iteration.rollouts for iteration in iterations]},
        "engine": {
            "replicas": config.generation.replicas,
            "slots": _slots(run),
            "refit_seconds": _measured([iteration.refit for iteration in iterations]),
        },
        "trainer": {"seconds": _measured([iteration.training for iteration in iterations]), "gpus": 1},
        "faults": {"rollout": failed / (failed + count), "attempts": 1},
    }


def _iteration(run: Run, iteration: int, manifests: dict[str, Manifest]) -> RecordedIteration:
    collect = run.stage(iteration, StageKind.COLLECT).reference()
    assert collect is not None, "it is among the manifests"
    rows = read_table(collect, "rollouts").select(["status", "seconds"]).to_pylist()
    lasted = {kind: manifest.finished_at - manifest.started_at for kind, manifest in manifests.items()}
    wall = manifests[StageKind.REPORT].metrics["time/iteration"] - sum(lasted.get(kind, 0.0) for kind in BESIDE)
    rollouts = [row["seconds"] for row in rows if row["status"] != Status.FAILED]
    generating = makespan(rollouts, _slots(run) * run.config.generation.replicas)
    return RecordedIteration(
        wall=wall,
        refit=lasted[StageKind.REFIT],
        training=max(0.0, wall - lasted[StageKind.REFIT] - generating),
        rollouts=rollouts,
        failed=sum(row["status"] == Status.FAILED for row in rows),
    )


def makespan(seconds: list[float], slots: int) -> float:
    """How long rollouts take that begin in order, each in the slot that is free first."""
    free = [0.0] * min(slots, max(1, len(seconds)))
    for duration in seconds:
        heapq.heappush(free, heapq.heappop(free) + duration)
    return max(free)


def _slots(run: Run) -> int:
    rollout = run.config.rollout
    return -(
        -(rollout.concurrency or rollout.prompts_per_iteration * rollout.group_size) // run.config.generation.replicas
    )


def _measured(values: list[float]) -> dict[str, Any]:
    return {"kind": "measured", "values": values}
