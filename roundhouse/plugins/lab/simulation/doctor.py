"""Find the stage that limits a run, and the gain of each single change, from its recorded durations.

Invariant: a prediction changes one thing of the recorded scenario and simulates it like the run itself; the gain is the
difference of the two, so omissions of the simulation cancel. Changes without recorded data are not predicted.

    change           effect on the recorded scenario                               uncertainty
    replicas         twice the replicas, the same rollouts in flight               slope of seconds a token over load
    concurrency      twice the rollouts in flight                                  the same
    staleness        the next batch is generated while this one is trained on      none
    trainer ranks    half the trainer's computation                                70 to 100 % of the speed-up arrive
    shards           half the share of the rollouts' time that is Python's         the same
    storage          half of refit and of the waits for the store                  the same

Load: the slow-down of a rollout by others on its replica is fitted to the rows (`load_slope`). The rollouts' work
without it is then simulated, so that each change is slowed by its own load; without an effect, replicas and concurrency
change only the queueing.

The expected error combines that of the mean over the recorded iterations (one standard error) and the change's own, in
quadrature.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from roundhouse.errors import StoreError
from roundhouse.plugins.lab.simulation.comparison import BESIDE, NEEDED, recorded_iterations, recorded_scenario
from roundhouse.plugins.lab.simulation.run import simulate
from roundhouse.plugins.lab.simulation.scenario import parse_scenario
from roundhouse.stages.report import iteration_manifests
from roundhouse.store.run import Run
from roundhouse.store.stage import Manifest, StageKind, read_table
from roundhouse.trajectories.records import Status

ITERATIONS = 60
"""Simulated for each prediction, at least: each recorded iteration equally often, so that their mean is that of the record."""
ARRIVES = (0.7, 1.0)
"""Share of an ideal speed-up that arrives."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One change, and the resulting time of an iteration."""

    change: str
    what: str
    seconds: float
    gain: float
    """Seconds of an iteration that it saves; negative: it costs."""
    error: float
    """One standard error of the gain, seconds."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Time of a run's iterations by part, and useful changes."""

    run_id: str
    iterations: int
    seconds: float
    """Mean wall time of an iteration without evaluation."""
    parts: dict[str, float]
    """Mean seconds by part: generation, train, refit, validate, storage, orchestration."""
    binds: str
    """The largest of them."""
    simulated: float
    """Simulated time of the unchanged run."""
    changes: list[Forecast]
    """Best first."""
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(run: Run, since: int | None = None) -> Diagnosis:
    """Find the limiting part and the gain of each single change.

    Args:
        since: the first iteration that counts; by default the second if there are several, because the first includes
            imports.

    Raises:
        StoreError: fewer than two iterations are reported, or the run overlaps generation and training or collects in
            rounds, so that its durations do not add up.
    """
    if run.config.asynchrony.staleness > 0:
        raise StoreError(
            f"Run {run.run_id} has asynchrony.staleness={run.config.asynchrony.staleness}: its stages overlap, and their "
            "durations do not show the time of one stage alone. Diagnose a synchronous run; `roundhouse simulate` compares "
            "bounds."
        )
    first = run.first_version + 1
    reported = [
        k
        for k in range(first, run.config.iterations + 1)
        if all(kind in iteration_manifests(run, k) for kind in NEEDED)
    ]
    begin = since if since is not None else first + (len(reported) > 2)
    recorded = recorded_iterations(run, begin)
    if len(recorded) < 2:
        raise StoreError(
            f"Run {run.run_id} has {len(recorded)} complete since iteration {begin}; a diagnosis takes two iterations."
        )
    numbers = [k for k in reported if k >= begin]
    parts = [_parts(iteration_manifests(run, k), each.wall) for k, each in zip(numbers, recorded, strict=True)]
    mean = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
    tree = recorded_scenario(run, begin) | {"iterations": -(-ITERATIONS // len(recorded)) * len(recorded)}
    slope, slope_error = load_slope(run, numbers)
    slopes = [slope, max(0.0, slope - slope_error), min(SLOPES[-1], slope + slope_error)]
    trees = [_under_load(run, numbers, tree, each) for each in slopes]
    before = _simulated(trees[0])
    walls = [each.wall for each in recorded]
    seconds = statistics.fmean(walls)
    noise = statistics.stdev(walls) / math.sqrt(len(walls)) / seconds
    python = min(1.0, statistics.fmean(_python_share(run, k) for k in numbers))
    notes = (
        [] if slope else ["the rows show no effect of load on a rollout's speed: more replicas only shorten its queue"]
    )
    changes = []
    for change, what, altered, spread in _changes(trees, mean, python):
        after = [_simulated(each) for each in altered]
        gain = before - after[0]
        own = max((abs(value - after[0]) for value in after[1:]), default=0.0) * spread
        changes.append(Forecast(change, what, after[0], gain, math.hypot(own, abs(gain) * noise, before * 0.01)))
    changes.sort(key=lambda each: -each.gain)
    return Diagnosis(
        run_id=run.run_id,
        iterations=len(recorded),
        seconds=seconds,
        parts=mean,
        binds=max(mean, key=mean.__getitem__),
        simulated=before,
        changes=changes,
        notes=notes,
    )


SLOPES = np.concatenate([[0.0], np.geomspace(0.005, 0.99, 100)])
"""Below 1: no replica gives fewer tokens a second to two rollouts than to one."""


def load_slope(run: Run, iterations: Sequence[int]) -> tuple[float, float]:
    """Return the relative slow-down of a rollout per further rollout on its replica, and its standard error; (0, 0) if
    the effect is not above its error.

    A replica with n rollouts gives each tokens at the rate 1 / (a (1 + slope (n - 1))). The slope is the one under
    which the rollouts' tokens are most equally explained: least squares of log(tokens) over the integral of that rate.
    """
    columns = ["started_at", "seconds", "generation_seconds", "generated_tokens"]
    residuals = []
    for k in iterations:
        reference = run.stage(k, StageKind.COLLECT).reference()
        assert reference is not None, "the iteration is whole"
        rows = read_table(reference, "rollouts").select(columns)
        started, lasted, generating, tokens = (rows[name].to_numpy().astype(np.float64) for name in columns)
        valid = (tokens > 0) & (generating > 0) & (lasted > 0)
        if valid.any():
            share = np.log(tokens[valid] * lasted[valid] / generating[valid])
            residuals.append(
                share - np.log(_attained(started, started + lasted, run.config.generation.replicas, SLOPES)[:, valid])
            )
    if not residuals or (count := sum(each.shape[1] for each in residuals)) < 8:
        return 0.0, 0.0
    matrix = np.concatenate(residuals, axis=1)
    errors = ((matrix - matrix.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    best = int(errors.argmin())
    within = np.flatnonzero(errors <= errors[best] * (1 + 1 / (count - 2)))
    slope, error = float(SLOPES[best]), float(SLOPES[within[-1]] - SLOPES[within[0]]) / 2
    return (slope, error) if slope > 2 * error else (0.0, 0.0)


def _attained(begun: np.ndarray, ended: np.ndarray, replicas: int, slopes: np.ndarray) -> np.ndarray:
    """[slopes, rollouts] the integral over a rollout's time of 1 / (1 + slope (n - 1)), n the mean rollouts a replica."""
    times = np.unique(np.concatenate([begun, ended]))
    middle = (times[1:] + times[:-1]) / 2
    running = ((begun[:, None] <= middle) & (middle < ended[:, None])).sum(axis=0) / replicas
    rates = 1 / (1 + slopes[:, None] * (np.maximum(running, 1) - 1))
    whole = np.concatenate([np.zeros((len(slopes), 1)), np.cumsum(rates * np.diff(times), axis=1)], axis=1)
    return whole[:, np.searchsorted(times, ended)] - whole[:, np.searchsorted(times, begun)]


def _under_load(run: Run, iterations: Sequence[int], tree: dict[str, Any], slope: float) -> dict[str, Any]:
    """The scenario with rollouts as seconds of work without others, on replicas that are slowed by load."""
    if not slope:
        return tree
    works = []
    for k in iterations:
        reference = run.stage(k, StageKind.COLLECT).reference()
        assert reference is not None, "the iteration is whole"
        rows = read_table(reference, "rollouts").select(["status", "started_at", "seconds"]).sort_by("started_at")
        started, lasted = (rows[name].to_numpy().astype(np.float64) for name in ("started_at", "seconds"))
        [work] = _attained(started, started + lasted, run.config.generation.replicas, np.array([slope]))
        works.append(work[np.array(rows["status"].to_pylist()) != Status.FAILED].tolist())
    engine = tree["engine"] | {"step_seconds": 1 - slope, "step_seconds_per_rollout": slope}
    return tree | {"engine": engine, "rollout": tree["rollout"] | {"iterations": works}}


def _changes(
    trees: Sequence[dict[str, Any]], mean: dict[str, float], python: float
) -> list[tuple[str, str, list[dict[str, Any]], float]]:
    """(change, in words, scenarios: as predicted and its bounds, weight of the bounds) of each single change.

    Args:
        trees: the recorded scenario with the fitted effect of load, and with its bounds.
    """
    tree = trees[0]
    engine = tree["engine"]
    replicas, slots = engine["replicas"], engine["slots"]
    rollouts = tree["groups"] * tree["group_size"]
    ends = [sum(ARRIVES) / 2, *ARRIVES]
    doubled = [_engine(each, 2 * replicas, -(-slots // 2)) for each in trees]
    changes = [("replicas", f"generation.replicas: {replicas} -> {2 * replicas}", doubled, 1.0)]
    if replicas * slots < rollouts:
        more = min(2 * slots, -(-rollouts // replicas))
        wider = [_engine(each, replicas, more) for each in trees]
        changes.append(("concurrency", f"rollout.concurrency: {replicas * slots} -> {replicas * more}", wider, 1.0))
    ahead = tree | {"asynchrony": {"mode": "batch-async", "staleness": 1}}
    changes.append(("staleness", "asynchrony: {mode: batch-async, staleness: 1}", [ahead], 0.0))
    trained = [_shorter(tree, "trainer", "seconds", mean["train"] * share / 2) for share in ends]
    changes.append(("trainer ranks", "twice the ranks (train.service)", trained, 1.0))
    stored = [
        _shorter(
            _shorter(tree, "trainer", "seconds", mean["storage"] * waits / 2),
            "engine",
            "refit_seconds",
            mean["refit"] * share / 2,
        )
        for waits, share in zip((1.0, *ARRIVES), ends, strict=True)  # waits were measured: all of them are the store's
    ]
    changes.append(("storage", "storage of twice the speed", stored, 1.0))
    if python > 0.05:
        scaled = [_engine(tree, replicas, slots, 1 - python * share / 2) for share in ends]
        changes.append(("shards", f"twice as many collecting processes ({python:.0%} of it is Python's)", scaled, 1.0))
    return changes


def _engine(tree: dict[str, Any], replicas: int, slots: int, factor: float = 1.0) -> dict[str, Any]:
    """The scenario with so many replicas and slots, and rollouts of so much more work."""
    iterations = [[seconds * factor for seconds in each] for each in tree["rollout"]["iterations"]]
    return tree | {
        "engine": tree["engine"] | {"replicas": replicas, "slots": slots},
        "rollout": tree["rollout"] | {"iterations": iterations},
    }


def _shorter(tree: dict[str, Any], section: str, key: str, less: float) -> dict[str, Any]:
    """The scenario with recorded durations (`values` of a section's key) that are shorter by so many seconds."""
    seconds = tree[section][key]
    values = [max(0.0, value - less) for value in seconds["values"]]
    return tree | {section: tree[section] | {key: seconds | {"values": values}}}


def _simulated(tree: dict[str, Any]) -> float:
    """Mean seconds of an iteration."""
    return simulate(parse_scenario(tree)).seconds / tree["iterations"]


def _parts(manifests: dict[str, Manifest], wall: float) -> dict[str, float]:
    """Return seconds of an iteration by part; they add up to its wall time."""
    lasted = {kind: each.finished_at - each.started_at for kind, each in manifests.items() if kind not in BESIDE}
    metrics = {name: value for each in manifests.values() for name, value in each.metrics.items()}
    generation = min(lasted[StageKind.COLLECT], metrics.get("time/rollouts", lasted[StageKind.COLLECT]))
    train = min(lasted.get(StageKind.TRAIN, 0.0), metrics.get("time/compute", lasted.get(StageKind.TRAIN, 0.0)))
    around: dict[str, float] = {StageKind.COLLECT: lasted[StageKind.COLLECT] - generation}
    if StageKind.TRAIN in lasted:
        around[StageKind.TRAIN] = lasted[StageKind.TRAIN] - train
    parts = {
        "generation": generation,
        "train": train,
        "refit": lasted[StageKind.REFIT],
        "validate": lasted.get(StageKind.VALIDATE, 0.0),
    }
    if "time/store" in metrics:
        parts["validate"] -= _stored(manifests, StageKind.VALIDATE)
        parts["storage"] = _storage(manifests, metrics, around)
    else:  # recorded before waits for the store were
        parts["storage"] = around.get(StageKind.TRAIN, 0.0) + lasted.get(StageKind.CHECKPOINT, 0.0)
    return parts | {"orchestration": max(0.0, wall - sum(parts.values()))}


def _storage(manifests: dict[str, Manifest], metrics: dict[str, float], around: dict[str, float]) -> float:
    """Return the seconds of an iteration in which the flow waits for the store, outside refit: in stages and between
    them.

    Args:
        around: seconds of stages outside rollouts and computation; storing during these delays nothing.
    """
    hidden = sum(max(0.0, _stored(manifests, kind) - seconds) for kind, seconds in around.items())
    beside = sum(_stored(manifests, kind) for kind in (StageKind.REFIT, *BESIDE))
    saved = min(around.get(StageKind.TRAIN, 0.0), metrics.get("train/save_seconds", 0.0))
    by_ranks = max(0.0, saved - _stored(manifests, StageKind.TRAIN))  # the flow's process waits for the storing ones
    return max(0.0, metrics["time/store"] - hidden - beside + by_ranks)


def _stored(manifests: dict[str, Manifest], kind: str) -> float:
    return manifests[kind].resources.get("store_seconds", 0.0) if kind in manifests else 0.0


def _python_share(run: Run, k: int) -> float:
    """Share of the time in which rollouts ran that the collecting process computed."""
    manifest = iteration_manifests(run, k)[StageKind.COLLECT]
    window = manifest.metrics.get("time/rollouts", manifest.finished_at - manifest.started_at)
    return manifest.resources.get("cpu_seconds", 0.0) / window if window > 0 else 0.0
