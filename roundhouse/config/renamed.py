"""Configuration keys and values that have another name now: refused in a user's configuration, translated in a stored one.

translated({"train": {"updates": 4}})              == {"train": {"minibatches": 4}}
renamed_in({"train": {"updates": 4}})              == ["train.updates: 4 is now train.minibatches: 4"]
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A key, or some of its values, under an old name."""

    old: str
    """Dotted key."""
    new: str
    """Equal to `old` if only values are renamed."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """New values by old ones; every other value stays."""


RENAMED = (
    Renamed("generation.weights", "generation.weight_sync"),
    Renamed(
        "generation.running",
        "generation.inflight_requests",
        {"finish": "drain", "keep": "continue", "abort": "restart"},
    ),
    Renamed("asynchrony.refit", "asynchrony.refit", {"finish": "drain"}),
    Renamed("placement.trainer_with_engine", "placement.colocation", {"anywhere": "none", "apart": "spread"}),
    Renamed("rollout.tasks", "rollout.prompts_per_iteration"),
    Renamed("rollout.distribution.kind", "rollout.distribution.kind", {"none": "in_process"}),
    Renamed("validation.text", "validation.check_text"),
    Renamed("train.updates", "train.minibatches"),
    Renamed(
        "evaluation.approval.training",
        "evaluation.approval.while_pending",
        {"goes_on": "continue", "waits": "block"},
    ),
    Renamed("evaluation.approval.limit_hours", "evaluation.approval.timeout_hours"),
    Renamed("evaluation.approval.at_limit", "evaluation.approval.on_timeout"),
    Renamed("offline.sample", "offline.precheck_rollouts"),
    Renamed("offline.min_effective_sample_fraction", "offline.min_ess_fraction"),
    Renamed("offline.min_effective_rollout_fraction", "offline.min_rollout_ess_fraction"),
    Renamed("failures.max_skipped_in_a_row", "failures.max_consecutive_skips"),
    Renamed("alerts.reward_over", "alerts.reward_window"),
    Renamed("infra.patience_seconds", "infra.api_outage_seconds"),
)


def renamed_in(tree: Tree) -> list[str]:
    """Return one sentence per old name in a configuration, with the new name."""
    return [f"{rename.old}: {_text(old)} is now {rename.new}: {_text(new)}" for rename, old, new in _found(tree)]


def translated(tree: Tree) -> Tree:
    """The configuration under today's names; itself when it is written in them."""
    tree = _synchronous(tree)
    old_names = list(_found(tree))
    if not old_names:
        return tree
    tree = copy.deepcopy(tree)
    for rename, _, new in old_names:
        *parents, old_leaf = rename.old.split(".")
        section = _section(tree, parents)
        assert section is not None
        new_leaf = rename.new.rsplit(".", 1)[-1]
        # Keys keep their order: a resolved configuration is shown in the order of its fields.
        items = [(new_leaf, new) if key == old_leaf else (key, value) for key, value in section.items()]
        section.clear()
        section.update(items)
    return tree


def _found(tree: Tree) -> Iterator[tuple[Renamed, Any, Any]]:
    """Each rename that the configuration needs, with the value it has and the one it is to have."""
    for rename in RENAMED:
        *parents, leaf = rename.old.split(".")
        section = _section(tree, parents)
        if section is None or leaf not in section:
            continue
        old = section[leaf]
        new = rename.values.get(old, old) if isinstance(old, str) else old
        if rename.new != rename.old or new != old:
            yield rename, old, new


def _synchronous(tree: Tree) -> Tree:
    """Return the configuration with `sync` for the modes that were accepted with staleness 0, and were sync with it."""
    asynchrony = _section(tree, ["asynchrony"]) or {}
    if asynchrony.get("mode") not in ("fully-async", "windowed") or asynchrony.get("staleness", 0) != 0:
        return tree
    return {**tree, "asynchrony": {**asynchrony, "mode": "sync"}}


def _section(tree: Any, parents: list[str]) -> Tree | None:
    """Return the section of this path; None if the configuration does not have it."""
    for parent in parents:
        tree = tree.get(parent) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _text(value: Any) -> str:
    """Return the value as YAML text; omit sections and lists."""
    return "…" if isinstance(value, dict | list) else value if isinstance(value, str) else json.dumps(value)
