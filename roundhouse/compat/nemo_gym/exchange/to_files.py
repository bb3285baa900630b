"""A Parquet dataset of rollouts as NeMo Gym's files.

Invariant: every rollout is on exactly one line: of the rollouts file if it has a reward, otherwise of the failures sidecar. An
imported dataset gives back the files that it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from roundhouse.compat.nemo_gym.exchange.incoming import restored_row
from roundhouse.compat.nemo_gym.exchange.json_lines import CollectionFiles, Row, write_rows
from roundhouse.compat.nemo_gym.exchange.outgoing import Address, addresses, materialized_row, result_row
from roundhouse.compat.nemo_gym.exchange.reading import DATASET, File, Original, originals_from_table
from roundhouse.compat.nemo_gym.servers.aggregate import aggregate_metrics, light
from roundhouse.store.manifest import Reference
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    files: CollectionFiles
    rollouts: int
    failures: int


def export_rollouts(
    reference: Reference, directory: Path, *, stem: str = "rollouts", agent: str | None = None
) -> Exported:
    """Write a complete collect or evaluate stage to `<directory>/<stem>*.jsonl` and its aggregate metrics.

    Args:
        agent: instance name for `agent_ref` where a task has none; by default the rollout's environment.
    """
    rollouts = rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))
    originals: list[Original] = []
    if any(entry.path.startswith(f"{DATASET}-") for entry in read_manifest(reference).files):
        originals = originals_from_table(read_table(reference, DATASET))
    return write_collection(rollouts, originals, CollectionFiles(directory / f"{stem}.jsonl"), agent)


def write_collection(
    rollouts: Sequence[Rollout], originals: Sequence[Original], files: CollectionFiles, agent: str | None = None
) -> Exported:
    """Write records, and what their import kept beside them, as the files of a collection."""
    places = addresses(rollouts, agent)
    lines = _original_lines(rollouts, places, originals) if originals else _own_lines(rollouts, places)
    light_rows: list[Row] = []
    succeeded = write_rows(files.rollouts, _noted(lines["rollouts"], light_rows))
    failed = write_rows(files.failures, lines["failures"])
    write_rows(files.materialized_inputs, lines["materialized_inputs"])
    metrics = metrics_by_agent(light_rows)
    files.aggregate_metrics.write_bytes(orjson.dumps(metrics, option=orjson.OPT_INDENT_2))
    return Exported(files, succeeded, failed)


def metrics_by_agent(light_rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The aggregate metrics file: an entry an agent."""
    by_agent: dict[str, list[Row]] = {}
    for row in light_rows:
        agent = row.get("agent_ref")
        name = agent.get("name") if isinstance(agent, dict) else None
        by_agent.setdefault(str(name or "agent"), []).append(row)
    return [{"agent_ref": {"name": name}, **aggregate_metrics(own)} for name, own in by_agent.items()]


def _noted(rows: Iterator[Row], light_rows: list[Row]) -> Iterator[Row]:
    """The rows as they pass, what statistics need of them put aside."""
    for row in rows:
        light_rows.append(light(row))
        yield row


def _own_lines(rollouts: Sequence[Rollout], places: Sequence[Address]) -> dict[File, Iterator[Row]]:
    pairs = list(zip(rollouts, places, strict=True))
    in_order = sorted(pairs, key=lambda pair: (pair[1].task_index, pair[1].rollout_index))
    return {
        "rollouts": (result_row(*pair) for pair in pairs if pair[0].reward is not None),
        "failures": (result_row(*pair) for pair in pairs if pair[0].reward is None),
        "materialized_inputs": (materialized_row(*pair) for pair in in_order),
    }


def _original_lines(
    rollouts: Sequence[Rollout], places: Sequence[Address], originals: Sequence[Original]
) -> dict[File, Iterator[Row]]:
    records = {rollout.rollout_id: (rollout, place) for rollout, place in zip(rollouts, places, strict=True)}

    def row_of(original: Original) -> Row:
        if original.row is not None:
            return original.row
        assert original.rollout_id is not None
        rollout, place = records[original.rollout_id]
        if original.file == "materialized_inputs":
            return rollout.task
        return result_row(rollout, place) if original.remnant is None else restored_row(rollout, original.remnant)

    def lines(file: File) -> Iterator[Row]:
        return (row_of(one) for one in sorted(originals, key=lambda one: one.line) if one.file == file)

    return {
        "rollouts": lines("rollouts"),
        "failures": lines("failures"),
        "materialized_inputs": lines("materialized_inputs"),
    }
