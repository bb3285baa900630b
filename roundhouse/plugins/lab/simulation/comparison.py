"""Several ways to run one scenario, compared; and a scenario from a run's recorded durations.

Invariant: all rows have the same rollouts, lengths and durations; speed-ups are relative to the first row.

In a recorded scenario, rollouts' seconds were measured under the run's load, and are repeated for any number of slots.
It therefore compares modes and replicas at about that load, and does not model how an engine slows down beyond it. The
rest of an iteration outside refit and rollouts (opening the environment, validate, train, report, …) counts as
training: in `sync` the simulated iteration is as long as the recorded one, by construction.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roundhouse.errors import ConfigError, StoreError
from roundhouse.plugins.lab.simulation.run import simulate
from roundhouse.plugins.lab.simulation.scenario import Scenario, parse_scenario
from roundhouse.stages.report import iteration_manifests
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_table
from roundhouse.trajectories.records import Status


@dataclass(frozen=True, slots=True)
class Row:
    """One way, and what came of it."""

    mode: str
    staleness: int
    window: int
    refit: str
    replicas: int
    gpus: int
    iterations_per_hour: float
    speedup: float
    iterations_per_gpu_hour: float
    trainer_wait: float
    engine_idle: float
    mean_age: float
    ages: dict[int, float]
    """Share of the trained rollouts, by age."""
    discarded: float
    """Share of slot time."""
    discarded_attempts: dict[str, int]
    failed: int
    hours: float


def variants(
    tree: dict[str, Any], modes: Sequence[str], stalenesses: Sequence[int], replicas: Sequence[int]
) -> Iterator[Scenario]:
    """sync first, then each mode with each bound, for each number of replicas. Without modes, the scenario's own."""
    own = parse_scenario(tree)
    for count in replicas or [own.engine.replicas]:
        engine = {**tree.get("engine", {}), "replicas": count}
        yield parse_scenario({**tree, "engine": engine, "asynchrony": {"mode": "sync"}})
        for mode in modes or ([own.asynchrony.mode] if own.asynchrony.mode != "sync" else []):
            if mode == "sync":
                continue
            # settings of the scenario's asynchrony that apply to this mode too
            keys = ("refit",) if mode == "batch-async" else ()
            asynchrony = tree.get("asynchrony", {})
            settings = {key: value for key, value in asynchrony.items() if mode == "windowed" or key in keys}
            for staleness in stalenesses or [own.asynchrony.staleness]:
                asynchrony = {**settings, "mode": mode, "staleness": staleness}
                yield parse_scenario({**tree, "engine": engine, "asynchrony": asynchrony})


def compare(scenarios: Sequence[Scenario]) -> list[Row]:
    """Simulate each."""
    if not scenarios:
        raise ConfigError("No scenario is named. Give a mode, sync for example.")
    rows: list[Row] = []
    for scenario in scenarios:
        outcome = simulate(scenario)
        reference = rows[0] if rows else None
        asynchrony, engine = scenario.asynchrony, scenario.engine
        gpus = engine.replicas * engine.gpus + scenario.trainer.gpus
        rate, total = outcome.iterations_per_hour, max(1, outcome.ages.total())
        rows.append(
            Row(
                mode=asynchrony.mode,
                staleness=asynchrony.staleness,
                window=asynchrony.window,
                refit=asynchrony.refit,
                replicas=engine.replicas,
                gpus=gpus,
                iterations_per_hour=rate,
                speedup=rate / reference.iterations_per_hour if reference else 1.0,
                iterations_per_gpu_hour=rate / gpus,
                trainer_wait=outcome.trainer_wait,
                engine_idle=outcome.engine_idle,
                mean_age=outcome.mean_age,
                ages={age: outcome.ages[age] / total for age in sorted(outcome.ages)},
                discarded=outcome.discarded_share,
                discarded_attempts=dict(outcome.discarded),
                failed=outcome.failed,
                hours=outcome.seconds / 3600,
            )
        )
    return rows


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For a program."""
    return [asdict(row) for row in rows]


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
    """Return the reported iterations of a run, from `since` on.

    Raises:
        StoreError: no iteration is reported.
    """
    iterations = []
    for iteration in range(since, run.config.iterations + 1):
        manifests = iteration_manifests(run, iteration)
        if any(kind not in manifests for kind in NEEDED):
            continue
        collect = run.stage(iteration, StageKind.COLLECT).reference()
        assert collect is not None, "it is among the manifests"
        table = read_table(collect, "rollouts").select(["status", "seconds", "started_at"])
        rows = table.sort_by("started_at").to_pylist()  # how full the slots are depends on the order
        lasted = {kind: manifest.finished_at - manifest.started_at for kind, manifest in manifests.items()}
        wall = manifests[StageKind.REPORT].metrics["time/iteration"] - sum(lasted.get(kind, 0.0) for kind in BESIDE)
        rollouts = [row["seconds"] for row in rows if row["status"] != Status.FAILED]
        generating = makespan(rollouts, _slots(run) * run.config.generation.replicas)
        iterations.append(
            RecordedIteration(
                wall=wall,
                refit=lasted[StageKind.REFIT],
                training=max(0.0, wall - lasted[StageKind.REFIT] - generating),
                rollouts=rollouts,
                failed=len(rows) - len(rollouts),
            )
        )
    if not iterations:
        raise StoreError(
            f"{run.location.uri} has no reported iteration with durations. Let the run finish one, "
            "or give distributions with --config."
        )
    return iterations


def recorded_scenario(run: Run, since: int = 1) -> dict[str, Any]:
    """The tree of a `Scenario` with the run's plan, rollout seconds and stage seconds.

    Args:
        since: the first iteration that counts: a process' own first one holds imports, too.

    Raises:
        StoreError: nothing is recorded, or the run collected in rounds or with branches.
    """
    if run.config.rollout.dynamic_sampling is not None:
        raise StoreError(
            f"Run {run.run_id} has rollout.dynamic_sampling: it collected in rounds, which a simulated iteration does not "
            "have. Name a run without it, or give distributions with --config."
        )
    if run.config.rollout.branching is not None:
        raise StoreError(
            f"Run {run.run_id} has rollout.branching: its branches began when other rollouts had ended, which a simulated "
            "iteration does not have. Name a run without it, or give distributions with --config."
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


def makespan(seconds: list[float], slots: int) -> float:
    """Return the time of rollouts that start in order, each in the first free slot."""
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
