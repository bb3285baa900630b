"""Report: results of an iteration and a run, read from the committed manifests.

Invariant: every number here comes from a manifest; an unfinished run gives the same summary with fewer iterations.

Overhead is the time that Roundhouse adds to an iteration: its wall time outside the window of rollouts (engine,
environment and agent loop together), the trainer's computation, and evaluation. In an overlapped run, rollouts run
concurrently, and training's wait for them replaces their window.

`iteration_page` is one page of Markdown about an iteration for a workflow's UI: data of the manifests and a few
rollouts from the first part of each dataset. Its size and cost do not grow with the number of rollouts.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import statistics
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roundhouse import plugins
from roundhouse.collection.collector import deviation
from roundhouse.config.models import EnvironmentConfig
from roundhouse.errors import ConfigError
from roundhouse.health.errors import MISMATCH, REMEMBERED, WATCHED, Alert, Metrics, new_alerts
from roundhouse.imports import load_class
from roundhouse.stages.cost import iteration_cost, iteration_judges, run_totals, totals_after
from roundhouse.stages.evaluate import mean_interval, set_of, stage_of, task_means
from roundhouse.store.lease import all_drivers, fence_of
from roundhouse.store.location import waiting
from roundhouse.store.run import Run
from roundhouse.store.run_inputs import accepted_changes
from roundhouse.store.stage import Manifest, Reference, StageKind, parse_parquet, read_file, read_manifest, read_table
from roundhouse.trajectories.records import Rollout, Status, as_code, conversation_lines
from roundhouse.trajectories.schemas import rollouts_from_tables

STAGES: tuple[str, ...] = tuple(kind for kind in StageKind if kind is not StageKind.GENERATE)
BESIDE_TRAINING = (StageKind.REFIT, StageKind.COLLECT)
"""Stages of an overlapped run that run concurrently with the others."""
_PROCESS = uuid.uuid4().hex
"""Identifies reports written by one process without a restart in between."""
KUBERNETES_CALLS = "kubernetes_calls"
"""Name under which each stage counts its calls of the API server: train/kubernetes_calls."""
LEDGER = ("requested", "completed", "truncated", "failed", "masked", "omitted")


def report_iteration(run: Run, iteration: int) -> Reference:
    """Commit the iteration's report: its wall time, and the overhead by stage.

    The wall time runs from one report to the next, so that it holds everything in between: artifacts and the workflow
    engine's own work too. For the first iteration after a start it runs from the first stage. The time between two processes
    that worked on the iteration does not count.
    """
    stage = run.stage(iteration, StageKind.REPORT)
    if (earlier := stage.reference()) is not None:
        return earlier
    manifests = iteration_manifests(run, iteration)
    attempt = run.begin(stage, policy_version=iteration)
    metrics: dict[str, float] = {}
    if iteration > run.first_version:
        overlapped = run.config.asynchrony.staleness > 0
        on_the_way = {kind: m for kind, m in manifests.items() if not overlapped or kind not in BESIDE_TRAINING}
        began, stored = _began(run, iteration, on_the_way)
        now = time.time()
        wall = now - began - downtime(run, on_the_way.values(), now)
        metrics = {"time/store": waiting.seconds - stored}
        metrics |= overhead_seconds(on_the_way, wall) | iteration_cost(
            run.config, manifests, wall, iteration_judges(run, iteration, manifests)
        )
        if overlapped:
            waited = (
                max(0.0, manifests[StageKind.VALIDATE].started_at - began) if StageKind.VALIDATE in manifests else 0.0
            )
            metrics["overhead/total"] -= waited
            metrics["overhead/orchestration"] -= waited
            metrics["time/rollout_wait"] = waited
    # By name: a checkpoint's manifest repeats the metrics of its train stage, which must not be added twice.
    measured = {name: value for each in manifests.values() for name, value in each.metrics.items()}
    counts = [value for name, value in measured.items() if name.endswith(f"/{KUBERNETES_CALLS}")]
    metrics |= {"kubernetes/calls": sum(counts)} if counts else {}
    references = {kind: _reference(run, iteration, kind) for kind in manifests}
    inputs = {kind: reference for kind, reference in references.items() if reference is not None}
    before = run_totals(run, iteration - 1) if iteration > run.first_version else {}
    totals = totals_after(before, measured, metrics)
    return attempt.commit(
        inputs=inputs, metrics=metrics, details={"process": _PROCESS, "totals": totals, "store": waiting.seconds}
    )


def _began(run: Run, iteration: int, manifests: dict[str, Manifest]) -> tuple[float, float]:
    """When the iteration began, in seconds since the epoch, and how long this process had waited for the store by then."""
    before = _reference(run, iteration - 1, StageKind.REPORT)
    if before is not None:
        previous = read_manifest(before)
        if previous.details.get("process") == _PROCESS:
            return previous.finished_at, previous.details["store"]
    known = sum(manifest.resources.get("store_seconds", 0.0) for manifest in manifests.values())
    return min(manifest.started_at for manifest in manifests.values()), waiting.seconds - known


def downtime(run: Run, manifests: Iterable[Manifest], now: float) -> float:
    """Return the seconds of an iteration in which no process worked on it: from the last stage that one completed to the first
    that the next one began, or to now if this process began none."""
    fence = fence_of(run.location)
    own = None if fence is None else fence.token
    spans = {own: (now, now)}
    for manifest in manifests:
        began, ended = spans.get(manifest.lease, (manifest.started_at, manifest.finished_at))
        spans[manifest.lease] = (min(began, manifest.started_at), max(ended, manifest.finished_at))
    ordered = sorted(spans.values())
    return math.fsum(max(0.0, later[0] - earlier[1]) for earlier, later in itertools.pairwise(ordered))


def seconds_between_starts(run: Run, finished: float) -> float | None:
    """Return the seconds before a run's last stage in which no process drove it; None without a record.

    Each driver but the last one worked for the wall seconds of its record. The last one may be at work: its record is as old
    as its last renewal.
    """
    drivers = all_drivers(run.location)
    if not drivers or not all(driver.wall_seconds for driver in drivers[:-1]):
        return None
    ends = [run.created_at, *(driver.since + driver.wall_seconds for driver in drivers[:-1])]
    return math.fsum(max(0.0, min(driver.since, finished) - end) for driver, end in zip(drivers, ends, strict=True))


def overhead_seconds(manifests: dict[str, Manifest], wall: float) -> dict[str, float]:
    """Overhead of each stage and of the whole iteration, in seconds."""
    productive: dict[str, float] = {
        StageKind.COLLECT: _metric(manifests, StageKind.COLLECT, "time/rollouts"),
        StageKind.TRAIN: _metric(manifests, StageKind.TRAIN, "time/compute"),
    }
    metrics: dict[str, float] = {"time/iteration": wall}
    evaluating = [
        kind for kind in manifests if kind in (StageKind.EVALUATE, StageKind.PROMOTE) or set_of(kind) is not None
    ]
    stages = [kind for kind in manifests if kind not in evaluating and kind != StageKind.REPORT]
    for kind in stages:
        metrics[f"overhead/{kind}"] = max(0.0, stage_seconds(manifests[kind]) - productive.get(kind, 0.0))
    evaluation = sum(stage_seconds(manifests[kind]) for kind in evaluating)
    total = wall - sum(productive.values()) - evaluation
    metrics["overhead/orchestration"] = total - sum(metrics[f"overhead/{kind}"] for kind in stages)
    metrics["overhead/total"] = total
    return metrics


def iteration_manifests(run: Run, iteration: int) -> dict[str, Manifest]:
    """Manifests of the iteration's complete stages, the checkpoint among them, by stage; last those of kinds that are not among
    `StageKind`."""
    manifests = {}
    sets = [stage_of(name) for name in run.config.evaluation.sets]
    others = set((run.location / f"iterations/{iteration:06d}").names()) - {*StageKind, *sets}
    for kind in (*STAGES, *sets, *sorted(others)):
        reference = _reference(run, iteration, kind)
        if reference is not None:
            manifests[kind] = read_manifest(reference)
    return manifests


def iteration_metrics(manifests: dict[str, Manifest]) -> dict[str, float]:
    """All metrics of an iteration under their stable names, with seconds and CPU seconds of each stage."""
    metrics: dict[str, float] = {}
    for kind, manifest in manifests.items():
        if kind != StageKind.CHECKPOINT:  # it repeats the train stage's
            metrics |= manifest.metrics
        if kind != StageKind.REPORT:
            metrics[f"time/{kind}"] = stage_seconds(manifest)
            metrics[f"cpu_time/{kind}"] = manifest.resources.get("cpu_seconds", 0.0)
    if StageKind.VALIDATE in manifests:
        counts = manifests[StageKind.VALIDATE].counts
        metrics |= {f"ledger/{name}": float(counts.get(name, 0)) for name in LEDGER}
    return metrics


def reaches_target(run: Run, iteration: int) -> bool:
    """Return whether `finish.metric` of this iteration is at least `finish.at_least`, so that the run ends with it."""
    finish = run.config.finish
    if finish.at_least is None:
        return False
    value = iteration_metrics(iteration_manifests(run, iteration)).get(finish.metric)
    return value is not None and value >= finish.at_least


def sink_class(name: str) -> Any:
    """Return the class that `tracking.sinks` names, by the name of a plug-in or as `module:Class`.

    Raises:
        ConfigError: it cannot be imported, lacks `log_iteration`, cannot be made with the run, or its package is missing.
    """
    sink: Any = load_class(name, object, "tracking.sinks") if ":" in name else plugins.factory("sink", name)
    package = getattr(sink, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        extra = "" if ":" in name else plugins.find("sink", name).extra
        install = f"roundhouse[{extra}]" if extra else package
        raise ConfigError(
            f"tracking.sinks names {name!r}, which needs the package {package}. Install it: pip install '{install}'. Or leave "
            "the sink out."
        )
    if not callable(getattr(sink, "log_iteration", None)):
        raise ConfigError(f"tracking.sinks names {name!r}, which does not define log_iteration.")
    try:
        inspect.signature(sink).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"tracking.sinks names {name!r}, which cannot be created: {error}. Define __init__(self, run)."
        ) from error
    except ValueError:
        pass  # a class without a signature in Python
    return sink


def summarize(run: Run) -> dict[str, Any]:
    """The run in numbers: evaluations, curve, seconds by stage, ledger."""
    latest = run.latest_checkpoint()
    first = run.first_version
    newest = first if latest is None else latest.policy_version
    by_iteration = {k: iteration_manifests(run, k) for k in range(first, newest + 1)}
    evaluations = {
        k: evaluation_of(k, manifests) for k, manifests in by_iteration.items() if StageKind.EVALUATE in manifests
    }
    trained = [k for k, manifests in by_iteration.items() if StageKind.TRAIN in manifests]
    validated = [
        manifests[StageKind.VALIDATE].counts for manifests in by_iteration.values() if StageKind.VALIDATE in manifests
    ]
    finished = _last_finish(by_iteration.values())
    return {
        "run_id": run.run_id,
        "uid": run.uid,
        "store": run.location.uri,
        "parent": None if run.parent is None else run.parent.model_dump(mode="json"),
        "first_version": first,
        "iterations": first + len(trained),
        "iterations_wanted": newest if reaches_target(run, newest) else run.config.iterations,
        "environment": environment_name(run.config.environment),
        "converted_from": _policy_details(run).get("converted", {}).get("source"),
        "evaluation": {
            "before": evaluations.get(first),
            "after": evaluations[max(evaluations)] if len(evaluations) > 1 else None,
            "all": list(evaluations.values()),
            "never_trained_on": _never_trained_on(run, list(evaluations.values())),
            "changes": _changes_of_sets(run, evaluations),
        },
        "reward_by_iteration": [
            by_iteration[k][StageKind.COLLECT].metrics.get("reward/mean")
            if StageKind.COLLECT in by_iteration[k]
            else None
            for k in trained  # missing if no rollout had a reward, or the iteration was skipped before they were complete
        ],
        "skipped": [k for k in trained if "train/skipped" in by_iteration[k][StageKind.TRAIN].metrics],
        "wall_seconds": 0.0 if finished is None else finished - run.created_at,
        "seconds_between_starts": None if finished is None else seconds_between_starts(run, finished),
        "seconds_before_first_stage": _start_seconds(run, by_iteration.values()),
        "stage_seconds": {
            kind: round(
                sum(stage_seconds(manifests[kind]) for manifests in by_iteration.values() if kind in manifests), 3
            )
            for kind in dict.fromkeys(kind for manifests in by_iteration.values() for kind in manifests)
        },
        "overhead_seconds_per_iteration": _median_overhead(by_iteration.values()),
        "mismatch": {
            "max_abs_log_prob_difference": max(
                (by_iteration[k][StageKind.TRAIN].metrics.get("train/logprob_abs_diff_max", 0.0) for k in trained),
                default=None,
            )
        },
        "ledger": {name: sum(counts.get(name, 0) for counts in validated) for name in LEDGER},
        "latest_checkpoint": None if latest is None else latest.uri,
    }


def environment_name(environment: EnvironmentConfig) -> str:
    """Return the kind of an environment or, of a user's own, the name of its class."""
    target = getattr(environment, "target", None)
    return environment.kind if environment.kind != "custom" or not target else str(target).rpartition(":")[2]


def wall_seconds(run: Run) -> float:
    """Return the seconds from a run's creation to the end of its last complete stage, as the summary has them."""
    latest = run.latest_checkpoint()
    newest = run.first_version if latest is None else latest.policy_version
    finished = _last_finish(iteration_manifests(run, k) for k in range(run.first_version, newest + 1))
    return 0.0 if finished is None else finished - run.created_at


def _last_finish(iterations: Iterable[dict[str, Manifest]]) -> float | None:
    return max((m.finished_at for manifests in iterations for m in manifests.values()), default=None)


def _never_trained_on(run: Run, evaluations: list[dict[str, Any]]) -> bool:
    """Return whether the policy was certainly not trained on any evaluated task.

    A fork's parent, a dataset and task rows before a change may have held any task.
    """
    other_data = run.parent is not None or run.config.offline is not None or bool(accepted_changes(run.location))
    return not other_data and all(each.get("tasks_in_training") == 0 for each in evaluations)


def stage_seconds(manifest: Manifest) -> float:
    return manifest.finished_at - manifest.started_at


def _reference(run: Run, iteration: int, kind: str) -> Reference | None:
    stage = run.checkpoint(iteration) if kind == StageKind.CHECKPOINT else run.stage(iteration, kind)
    return stage.reference()


def _metric(manifests: dict[str, Manifest], kind: str, name: str) -> float:
    return manifests[kind].metrics.get(name, 0.0) if kind in manifests else 0.0


_NO_REWARD = dict.fromkeys(("reward_mean", "reward_stderr", "reward_low", "reward_high", "tasks"))
"""Summary values of an evaluation without any reward."""


def evaluation_of(version: int, manifests: dict[str, Manifest]) -> dict[str, Any]:
    manifest = manifests[StageKind.EVALUATE]
    own = _NO_REWARD | {_in_summary(name): value for name, value in manifest.metrics.items()}
    ledger = {name: manifest.counts.get(name, 0) for name in LEDGER}
    sets = {}
    for kind, stage_manifest in manifests.items():
        if (name := set_of(kind)) is not None:
            prefix = f"evaluation/{name}/"
            sets[name] = _NO_REWARD | {
                _in_summary(metric, prefix): value for metric, value in stage_manifest.metrics.items()
            }
    return {"version": version, **own, "ledger": ledger} | ({"sets": sets} if sets else {})


def _changes_of_sets(run: Run, evaluations: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how much the mean reward of each evaluation set changed from the first to the last version that has it.

    The same tasks are compared one by one: `change`, its standard error, and the ends of its 95 % interval.
    """
    changes = {}
    for name in run.config.evaluation.sets:
        versions = [version for version, each in evaluations.items() if name in each.get("sets", {})]
        if len(versions) < 2:
            continue
        before, after = (task_means(_rewards_of(run, version, name)) for version in (min(versions), max(versions)))
        if not (common := before.keys() & after.keys()):
            continue
        differences = [after[task] - before[task] for task in sorted(common)]
        interval = mean_interval(differences)
        changes[name] = {
            "change": interval.value,
            "stderr": deviation(differences) / len(differences) ** 0.5,
            "low": interval.low,
            "high": interval.high,
        }
    return changes


def _rewards_of(run: Run, version: int, name: str) -> dict[str, list[float]]:
    """Return the rewards of a version's evaluation set, by task."""
    reference = run.stage(version, stage_of(name)).reference()
    assert reference is not None, "its manifest was read"
    rewards: dict[str, list[float]] = {}
    for row in read_table(reference, "rollouts").select(["group_id", "status", "reward"]).to_pylist():
        if Status(row["status"]).counted and row["reward"] is not None:
            rewards.setdefault(row["group_id"], []).append(row["reward"])
    return rewards


def _in_summary(metric: str, prefix: str = "evaluation/") -> str:
    """The summary calls the mean over tasks and its interval `reward_mean`, `reward_low`, …, as it always has."""
    name = metric.removeprefix(prefix)
    return name.replace("/", "_") if name in ("reward/mean", "reward/stderr", "reward/low", "reward/high") else name


def _start_seconds(run: Run, iterations: Iterable[dict[str, Manifest]]) -> dict[str, float]:
    """Return the seconds from the run's creation to its first stage, and of these the seconds to make the starting
    policy (0 from the cache). The rest is services and the engine, which loads at the same time."""
    began = min(
        (m.started_at for ms in iterations for kind, m in ms.items() if kind != StageKind.CHECKPOINT), default=None
    )
    details = _policy_details(run)
    creation = details.get("warm_start") or details.get("converted") or {}
    return {
        "total": 0.0 if began is None else round(max(0.0, began - run.created_at), 3),
        "starting_policy": 0.0 if creation.get("reused") else round(creation.get("seconds", 0.0), 3),
    }


def _policy_details(run: Run) -> dict[str, Any]:
    """Return the record of the starting policy's creation; empty for a fork."""
    policy = run.checkpoint(0).reference() if run.parent is None else None
    return {} if policy is None else read_manifest(policy).details


def _median_overhead(iterations: Iterable[dict[str, Manifest]]) -> dict[str, float]:
    """Median over the iterations, of each stage and in all."""
    values: dict[str, list[float]] = {}
    for manifests in iterations:
        if StageKind.REPORT in manifests:
            for name, value in manifests[StageKind.REPORT].metrics.items():
                if name.startswith(("overhead/", "time/")):
                    values.setdefault(name, []).append(value)
    return {name: round(statistics.median(seconds), 3) for name, seconds in values.items()}


class AlertWatch:
    """The numbers of one run in this process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._history: deque[Metrics] = deque(maxlen=REMEMBERED + run.config.alerts.reward_window)
        self._newest: int | None = None

    def look(self, iteration: int) -> list[Alert]:
        """Alerts that begin with this iteration; each iteration is looked at once."""
        if self._newest is None:
            self._newest = max(self._run.first_version, iteration - (self._history.maxlen or 0))
            for k in range(self._newest + 1, iteration):
                self._history.append(watched_metrics(self._run, k))
        elif iteration <= self._newest:
            return []
        self._newest = iteration
        self._history.append(watched_metrics(self._run, iteration))
        return new_alerts(self._run.config.alerts, list(self._history))


def watched_metrics(run: Run, iteration: int) -> dict[str, float]:
    """Return the metrics of an iteration that can raise alerts; empty for a skipped iteration.

    Engine and trainer are compared only if both had the same weights: old rollouts differ by design.
    """
    config, watched = run.config, dict[str, float]()
    judged = WATCHED if config.offline is None and config.asynchrony.staleness == 0 else set(WATCHED) - {MISMATCH}
    for kind in (StageKind.COLLECT, StageKind.TRAIN):
        if (reference := run.stage(iteration, kind).reference()) is not None:
            metrics = read_manifest(reference).metrics
            watched |= {name: metrics[name] for name in judged if name in metrics}
    return watched


LONGEST_CELL = 400
"""Characters of a conversation in the table."""


def iteration_page(run: Run, iteration: int, manifests: Mapping[str, Manifest], samples: int = 8) -> str:
    """Outcome, stages, quarantine and sample rollouts of an iteration."""
    values = {name: value for manifest in manifests.values() for name, value in manifest.metrics.items()}
    figures = {
        "reward": values.get("reward/mean"),
        "held-out reward": values.get("evaluation/reward/mean"),
        "tokens not learnt from": values.get("waste/token_fraction"),
        "engine against trainer": values.get("train/token_mult_prob_error"),
        "clip fraction": values.get("train/clip_fraction"),
    }
    parts = [
        f"# {run.run_id}: iteration {iteration}",
        " · ".join(f"{name} **{value:.4g}**" for name, value in figures.items() if value is not None),
    ]
    if StageKind.VALIDATE in manifests:
        counts = [(name, manifests[StageKind.VALIDATE].counts.get(name, 0)) for name in LEDGER]
        parts.append(_table(["", *(name for name, _ in counts)], [["rollouts", *(str(count) for _, count in counts)]]))
    rows = [
        [
            kind,
            f"{stage_seconds(manifest):.2f}",
            f"{manifest.resources.get('cpu_seconds', 0.0):.2f}",
            f"{sum(entry.size for entry in manifest.files) / 2**20:.2f}",
            str(manifest.attempt),
        ]
        for kind, manifest in manifests.items()
    ]
    parts.append(_table(["stage", "seconds", "CPU seconds", "MiB written", "attempts"], rows))
    if StageKind.VALIDATE in manifests:
        validated = manifests[StageKind.VALIDATE]
        reasons: Mapping[str, int] = validated.details.get("reasons", {})
        failures: Mapping[str, int] = validated.details.get("failures", {})
        refused = [[f"failed: {as_code(code)}", str(rollouts)] for code, rollouts in failures.items()]
        refused += [[as_code(reason), str(rollouts)] for reason, rollouts in reasons.items()]
        parts.append(_table(["not trained on", "rollouts"], refused) if refused else "")
    collected = run.stage(iteration, StageKind.COLLECT).reference() if StageKind.COLLECT in manifests else None
    if collected is not None:
        sampled = [
            [
                as_code(rollout.rollout_id),
                rollout.status.value,
                "" if rollout.reward is None else f"{rollout.reward:g}",
                str(len(rollout.turns)),
                " · ".join(conversation_lines(rollout.items, LONGEST_CELL)),
            ]
            for rollout in first_rollouts(collected, manifests[StageKind.COLLECT], samples)
        ]
        parts.append(_table(["rollout", "status", "reward", "turns", "conversation"], sampled))
    return "\n\n".join(part for part in parts if part)


def first_rollouts(reference: Reference, manifest: Manifest, count: int) -> list[Rollout]:
    """The first rollouts of a complete stage with their turns, from its first part alone."""
    tables = []
    for dataset in ("rollouts", "turns"):
        entry = next(entry for entry in manifest.files if entry.path.startswith(f"{dataset}-"))
        tables.append(parse_parquet(read_file(reference, entry)))
    return rollouts_from_tables(tables[0].slice(0, count), tables[1])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    # Nothing that a policy writes may end a cell
    safe = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in safe)
