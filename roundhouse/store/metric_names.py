"""Metrics that have another name now: manifests of before are read under today's names."""

from __future__ import annotations

from collections.abc import Mapping

RENAMED_METRICS = {
    "train/idle_turns": "train/idle_microbatches",
    "validate/put_aside": "validate/filtered",
    "seconds/waited_for_rollouts": "time/rollout_wait",
    "cost/money": "cost/total",
    "wasted_tokens/failed": "waste/failed_tokens",
    "wasted_tokens/quarantined": "waste/quarantined_tokens",
    "wasted_tokens/omitted": "waste/omitted_tokens",
    "wasted_tokens/untrained": "waste/untrained_tokens",
    "wasted_tokens/share": "waste/token_fraction",
    "evaluation/reward_mean": "evaluation/reward/mean",
    "evaluation/reward_stderr": "evaluation/reward/stderr",
    "evaluation/reward_low": "evaluation/reward/low",
    "evaluation/reward_high": "evaluation/reward/high",
}
_PREFIXES = {"seconds/": "time/", "staleness/effective_sample/": "staleness/ess/"}
"""Of all other names that begin so."""


def current_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under today's names. Where an old and a new name meet, the renamed metric is the one that is kept."""
    renamed = {new: metrics[old] for old in metrics if (new := current_name(old)) != old}
    return {name: value for name, value in metrics.items() if current_name(name) == name} | renamed


def current_name(name: str) -> str:
    if name in RENAMED_METRICS:
        return RENAMED_METRICS[name]
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
