"""One rollout, whole: conversation, verdict, tokens. Read from the files that hold it, and from no other."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from roundhouse.query.parts import StageFiles, columns_found, dataset_of
from roundhouse.query.tables import COLUMNS
from roundhouse.store.stage import StageKind
from roundhouse.trajectories.schemas import QUARANTINE, ROLLOUTS, SEQUENCES, TURNS
from roundhouse.view.catalog import Catalog
from roundhouse.view.index import Index, Indexes
from roundhouse.view.scope import Scope, ViewError
from roundhouse.view.token_streams import Decoder, missing, streams_of

_PART = re.compile(r"rollouts-(a\d+-\d+\.parquet)$")


class Details:
    """Reads rollouts; keeps the vocabularies of the runs it has shown."""

    def __init__(self, catalog: Catalog, indexes: Indexes) -> None:
        self._catalog, self._indexes = catalog, indexes
        self.decoder = functools.lru_cache(maxsize=8)(self._load_decoder)

    def rollout(self, scope: Scope, iteration: int, rollout_id: str) -> dict[str, Any]:
        """Everything about a rollout.

        Raises:
            ViewError: it is not there.
        """
        index = self._indexes.at(scope)
        file = index.file_of(iteration, rollout_id)
        if file is None:
            raise ViewError(
                f"There is no rollout {rollout_id!r} in iteration {iteration} of {scope.run_id} ({scope.stage})."
            )
        stages = {stage.stage: stage for stage in index.stages if stage.iteration == iteration}
        own = stages[scope.stage]
        [row] = _rows_of(own, "rollouts", ROLLOUTS, rollout_id, only=file)
        turns = _turns(own, file, rollout_id)
        sequences, columns, refused = _trained(stages, rollout_id)
        streams = streams_of(turns, sequences, columns)
        self._spell(scope.run_id, streams)
        complete = {name: stage.complete for name, stage in stages.items()}
        verdict = refused[0] if refused else None
        return {
            "rollout": _readable(row),
            "iteration": iteration,
            "stage": scope.stage,
            "run_id": scope.run_id,
            "label": own.version,
            "complete": complete,
            "quarantine": verdict,
            "turns": [_told(turn) for turn in turns],
            "columns": [_scalars(row) for row in columns],
            "streams": streams,
            "missing": missing("dataset" if own.dataset else scope.stage, complete, iteration, verdict, streams),
            "siblings": _siblings(index, row["group_id"], iteration),
        }

    def group(self, scope: Scope, group: str, *, exact: bool = True, limit: int = 64) -> list[dict[str, Any]]:
        """The rollouts of a group with their conversations, for a look at them side by side."""
        index = self._indexes.at(scope)
        members = index.members(group, exact=exact)[:limit]
        texts: dict[tuple[int, str], Any] = {}
        for iteration in {member["iteration"] for member in members}:
            own = next(stage for stage in index.stages if (stage.stage, stage.iteration) == (scope.stage, iteration))
            names = [member["rollout_id"] for member in members if member["iteration"] == iteration]
            files = {index.file_of(iteration, name) for name in names}
            table = _scan(own, "rollouts", ROLLOUTS, files).to_table(
                columns=["rollout_id", "messages", "task", "reward_components", "metrics", "failure_detail"],
                filter=ds.field("rollout_id").isin(names),
            )
            for row in table.to_pylist(maps_as_pydicts="lossy"):
                texts[(iteration, row["rollout_id"])] = _readable(row)
        return [member | texts.get((member["iteration"], member["rollout_id"]), {}) for member in members]

    def quarantined(self, scope: Scope, limit: int = 2000) -> list[dict[str, Any]]:
        """What validation kept from training, with the evidence."""
        stages = [stage for stage in self._indexes.at(scope).stages if stage.stage == StageKind.VALIDATE]
        names = ["iteration", *QUARANTINE.names]
        return dataset_of(stages, "quarantine", QUARANTINE).head(limit, columns=names).to_pylist()

    def _spell(self, run_id: str, streams: Sequence[dict[str, Any]]) -> None:
        decoder = self.decoder(run_id)
        for stream in streams:
            stream["texts"] = None if decoder is None else decoder.texts(stream["ids"])

    def _load_decoder(self, run_id: str) -> Decoder | None:
        data = self._catalog.tokenizer_file(run_id)
        return None if data is None else Decoder(data)


def _scan(stage: StageFiles, dataset: str, schema: pa.Schema, files: set[str | None] | None = None) -> ds.Dataset:
    """The dataset of a stage, or only its parts of these names."""
    scanned = dataset_of([stage], dataset, schema)
    if files is None:
        return scanned
    ends = tuple(file.rsplit("/", 1)[-1] for file in files if file)
    fragments = [fragment for fragment in scanned.get_fragments() if fragment.path.rsplit("/", 1)[-1] in ends]
    return ds.FileSystemDataset(fragments, scanned.schema, scanned.format, scanned.filesystem)


def _rows_of(
    stage: StageFiles, dataset: str, schema: pa.Schema, rollout_id: str, only: str | None = None
) -> list[dict[str, Any]]:
    scanned = _scan(stage, dataset, schema, None if only is None else {only})
    names = [name for name in scanned.schema.names if name not in ("run_id", "iteration", "stage", "complete")]
    found = scanned.to_table(columns=names, filter=ds.field("rollout_id") == rollout_id)
    return found.to_pylist(maps_as_pydicts="lossy")


def _turns(stage: StageFiles, file: str, rollout_id: str) -> list[dict[str, Any]]:
    """Collection writes the turns of a part of rollouts as a part of the same number. Where that is not so, all are read."""
    match = _PART.search(file)
    found = _rows_of(stage, "turns", TURNS, rollout_id, only=f"turns-{match[1]}") if match else []
    return sorted(found or _rows_of(stage, "turns", TURNS, rollout_id), key=lambda turn: turn["turn"])


def _trained(stages: dict[str, StageFiles], rollout_id: str) -> tuple[list[Any], list[Any], list[Any]]:
    """The rollout's sequences, columns and quarantine rows, as far as their stages are complete."""
    validate, train = stages.get(StageKind.VALIDATE), stages.get(StageKind.TRAIN)
    if validate is None or not validate.complete:
        return [], [], []
    refused = _rows_of(validate, "quarantine", QUARANTINE, rollout_id)
    sequences = [] if refused else _rows_of(validate, "sequences", SEQUENCES, rollout_id)
    if train is None or not train.complete or not sequences:
        return sequences, [], refused
    return sequences, _rows_of(train, "columns", columns_found([train], "columns", COLUMNS), rollout_id), refused


def _siblings(index: Index, group: str, iteration: int) -> list[dict[str, Any]]:
    return [
        {name: member[name] for name in ("rollout_id", "sample", "reward", "status", "reason", "advantage")}
        for member in index.members(group, exact=True)
        if member["iteration"] == iteration
    ]


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """The JSON columns as JSON."""
    return row | {name: _parsed(row[name]) for name in ("messages", "task") if row.get(name) is not None}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _told(turn: dict[str, Any]) -> dict[str, Any]:
    lengths = {
        "new_tokens": len(turn["prompt_token_ids"] or ()),
        "generated_tokens": len(turn["generation_token_ids"] or ()),
    }
    names = ("turn", "parent", "prompt_length", "policy_version", "finish_reason", "latency_seconds", "trained")
    return {name: turn[name] for name in names} | lengths


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, list | dict)}
