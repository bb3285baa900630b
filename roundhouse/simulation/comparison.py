"""Several ways to run one scenario, side by side.

Invariant: all rows have the same rollouts, lengths and durations; speed-ups are told against the first row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roundhouse.config.simulation import Scenario, parse_scenario
from roundhouse.errors import ConfigError
from roundhouse.simulation.run import SimulationResult, simulate


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
            # what of the scenario's asynchrony says something in this mode too
            said = ("refit",) if mode == "batch-async" else ()
            asynchrony = tree.get("asynchrony", {})
            kept = {key: value for key, value in asynchrony.items() if mode == "windowed" or key in said}
            for staleness in stalenesses or [own.asynchrony.staleness]:
                asynchrony = {**kept, "mode": mode, "staleness": staleness}
                yield parse_scenario({**tree, "engine": engine, "asynchrony": asynchrony})


def compare(scenarios: Sequence[Scenario]) -> list[Row]:
    """Simulate each."""
    if not scenarios:
        raise ConfigError("There is no scenario to simulate. Give a mode, sync for example.")
    rows: list[Row] = []
    for scenario in scenarios:
        rows.append(_row(scenario, simulate(scenario), rows[0] if rows else None))
    return rows


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For a program."""
    return [asdict(row) for row in rows]


def _row(scenario: Scenario, outcome: SimulationResult, reference: Row | None) -> Row:
    asynchrony, engine = scenario.asynchrony, scenario.engine
    gpus = engine.replicas * engine.gpus + scenario.trainer.gpus
    rate, total = outcome.iterations_per_hour, max(1, outcome.ages.total())
    return Row(
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
