"""An iteration on one page of Markdown, for the artifacts of a workflow's UI.

Invariant: it says what the manifests say, plus a few rollouts from the first part of each dataset; its size and cost do not
grow with the number of rollouts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

from roundhouse.stages.report import LEDGER, stage_seconds
from roundhouse.store.manifest import Manifest, Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_file
from roundhouse.trajectories.records import Rollout, conversation_lines
from roundhouse.trajectories.schemas import rollouts_from_tables

LONGEST_CELL = 400
"""Characters of a conversation in the table."""


def iteration_page(run: Run, iteration: int, manifests: Mapping[str, Manifest], samples: int = 8) -> str:
    """Outcome, stages, quarantine and sample rollouts of an iteration."""
    parts = [f"# {run.run_id}: iteration {iteration}", _headline(manifests)]
    if StageKind.VALIDATE in manifests:
        counts = [(name, manifests[StageKind.VALIDATE].counts.get(name, 0)) for name in LEDGER]
        parts.append(_table(["", *(name for name, _ in counts)], [["rollouts", *(str(count) for _, count in counts)]]))
    parts.append(_stages(manifests))
    if StageKind.VALIDATE in manifests:
        parts.append(_quarantine(manifests[StageKind.VALIDATE]))
    collected = run.stage(iteration, StageKind.COLLECT).reference() if StageKind.COLLECT in manifests else None
    if collected is not None:
        parts.append(_samples(first_rollouts(collected, manifests[StageKind.COLLECT], samples)))
    return "\n\n".join(part for part in parts if part)


def first_rollouts(reference: Reference, manifest: Manifest, count: int) -> list[Rollout]:
    """The first rollouts of a complete stage with their turns, from its first part alone."""
    tables = []
    for dataset in ("rollouts", "turns"):
        entry = next(entry for entry in manifest.files if entry.path.startswith(f"{dataset}-"))
        tables.append(pq.read_table(io.BytesIO(read_file(reference, entry))))
    return rollouts_from_tables(tables[0].slice(0, count), tables[1])


def _headline(manifests: Mapping[str, Manifest]) -> str:
    found = {name: value for manifest in manifests.values() for name, value in manifest.metrics.items()}
    shown = {
        "reward": found.get("reward/mean"),
        "held-out reward": found.get("evaluation/reward/mean"),
        "tokens not learnt from": found.get("waste/token_fraction"),
        "engine against trainer": found.get("train/token_mult_prob_error"),
        "clip fraction": found.get("train/clip_fraction"),
    }
    return " · ".join(f"{name} **{value:.4g}**" for name, value in shown.items() if value is not None)


def _stages(manifests: Mapping[str, Manifest]) -> str:
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
    return _table(["stage", "seconds", "CPU seconds", "MiB written", "attempts"], rows)


def _quarantine(validated: Manifest) -> str:
    reasons: Mapping[str, int] = validated.details.get("reasons", {})
    failures: Mapping[str, int] = validated.details.get("failures", {})
    rows = [[f"failed: {code}", str(count)] for code, count in failures.items()]
    rows += [[reason, str(count)] for reason, count in reasons.items()]
    return _table(["not trained on", "rollouts"], rows) if rows else ""


def _samples(rollouts: Sequence[Rollout]) -> str:
    rows = [
        [
            rollout.rollout_id,
            rollout.status.value,
            "" if rollout.reward is None else f"{rollout.reward:g}",
            str(len(rollout.turns)),
            " · ".join(conversation_lines(rollout.items))[:LONGEST_CELL],
        ]
        for rollout in rollouts
    ]
    return _table(["rollout", "status", "reward", "turns", "conversation"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """A policy writes what it likes: nothing of it may end a cell or be read as HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
