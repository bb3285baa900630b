"""What an iteration and a run cost, and what of it was wasted, by reason.

Invariant: costs come from what stages recorded of themselves; a GPU costs while it is held, used or not. Every generated token
of an iteration's training rollouts is either trained on or wasted for exactly one reason, told by the stage that knows it:

    generated = trained on + failed + quarantined + omitted + untrained

    failed        its rollout has no reward                                             validate
    quarantined   validation refused its rollout                                        validate
    omitted       its group was too small, or more was collected than was wanted        validate
    untrained     the algorithm gave its sequences no weight: a group without spread    train
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.config.models import RunConfig
from roundhouse.config.train_service import ProcessService
from roundhouse.store.manifest import Manifest
from roundhouse.store.metric_names import current_names
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest
from roundhouse.trajectories.records import Rollout, Status

HOUR = 3600.0
BUDGETED = ("wall_hours", "gpu_hours", "cpu_hours", "generated_tokens", "money")
"""Names of `Budget`."""
_TOTAL_OF = {
    "time/iteration": ("wall_hours", HOUR),
    "cost/gpu_seconds": ("gpu_hours", HOUR),
    "cost/cpu_seconds": ("cpu_hours", HOUR),
    "cost/generated_tokens": ("generated_tokens", 1.0),
    "cost/total": ("money", 1.0),
}
"""Which total a metric adds to, and its unit in the metric's."""


def rollout_waste(rollouts: Sequence[Rollout], quarantine: pa.Table) -> dict[str, float]:
    """Tokens of rollouts that will not be trained on, for validation's manifest."""
    outcomes = dict(zip(quarantine["rollout_id"].to_pylist(), quarantine["outcome"].to_pylist(), strict=True))
    wasted = {"failed": 0, "quarantined": 0, "omitted": 0}
    generated = 0
    for rollout in rollouts:
        tokens = sum(len(turn.generation_token_ids) for turn in rollout.turns)
        generated += tokens
        outcome = outcomes.get(rollout.rollout_id)
        if rollout.status is Status.FAILED:
            wasted["failed"] += tokens
        elif outcome is not None:
            wasted["omitted" if outcome == Status.OMITTED else "quarantined"] += tokens
    return {
        "cost/generated_tokens": float(generated),
        "cost/repeated_rollouts": float(sum(rollout.attempt > 1 for rollout in rollouts)),
        **{f"waste/{reason}_tokens": float(count) for reason, count in wasted.items()},
    }


def untrained_tokens(sequences: pa.Table, columns: pa.Table) -> float:
    """Generated tokens of the sequences that a step was given and gave no weight."""
    idle = columns.filter(pc.invert(columns["trained"]))["sequence_id"]
    masks = sequences.filter(pc.is_in(sequences["sequence_id"], value_set=idle.combine_chunks()))["loss_mask"]
    return float(pc.sum(pc.list_flatten(masks).cast(pa.int64())).as_py() or 0)


def iteration_cost(config: RunConfig, manifests: Mapping[str, Manifest], seconds: float) -> dict[str, float]:
    """The cost metrics of an iteration, for its report; those of validate and train stand in their own manifests.

    Args:
        manifests: of its complete stages.
        seconds: wall time of the whole iteration.
    """
    stages = [manifest for kind, manifest in manifests.items() if kind != StageKind.REPORT]
    gpu_seconds = _gpu_seconds(config, manifests, seconds)
    cpu_seconds = sum(manifest.resources.get("cpu_seconds", 0.0) for manifest in stages)
    prices = config.cost.prices
    metrics = {
        "cost/gpu_seconds": gpu_seconds,
        "cost/cpu_seconds": cpu_seconds,
        "cost/bytes_written": float(sum(entry.size for manifest in stages for entry in manifest.files)),
        "cost/stage_attempts": float(sum(manifest.attempt for manifest in stages)),
    }
    if prices.gpu_hour or prices.cpu_hour:
        metrics["cost/total"] = (gpu_seconds * prices.gpu_hour + cpu_seconds * prices.cpu_hour) / HOUR
    found = {name: value for manifest in stages for name, value in manifest.metrics.items()}
    if generated := found.get("cost/generated_tokens"):
        wasted = sum(value for name, value in found.items() if is_waste(name))
        metrics["waste/token_fraction"] = wasted / generated
    return metrics


def totals_after(before: Mapping[str, float], *metrics: Mapping[str, float]) -> dict[str, float]:
    """Totals of a run with one more iteration: by the names of `Budget`, and wasted tokens by reason.

    Args:
        before: totals of the iterations before; empty for the first.
        metrics: of the iteration's stages, the report's among them.
    """
    totals = dict.fromkeys(BUDGETED, 0.0) | dict(before)
    for found in metrics:
        for name, value in found.items():
            total, unit = _TOTAL_OF.get(name, (name, 1.0))
            if name in _TOTAL_OF or is_waste(name):
                totals[total] = totals.get(total, 0.0) + value / unit
    return totals


def run_totals(run: Run, iteration: int) -> dict[str, float]:
    """Totals of all iterations up to a reported one; all 0 before the first."""
    reference = run.stage(iteration, StageKind.REPORT).reference()
    recorded = {} if reference is None else read_manifest(reference).details.get("totals", {})
    return totals_after(current_names(recorded))


def is_waste(name: str) -> bool:
    """Whether a metric or a total counts tokens wasted for one reason."""
    return name.startswith("waste/") and name.endswith("_tokens")


def _gpu_seconds(config: RunConfig, manifests: Mapping[str, Manifest], seconds: float) -> float:
    engine = config.generation.replicas * config.generation.gpus_per_replica
    train = manifests.get(StageKind.TRAIN)
    in_stage = 0.0 if train is None else train.finished_at - train.started_at
    held = in_stage if isinstance(config.train.service, ProcessService) else seconds
    return engine * seconds + config.cost.trainer_gpus * held
