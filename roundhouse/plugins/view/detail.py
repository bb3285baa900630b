"""One whole rollout: conversation, verdict, tokens. Read only from the files that hold it.

Invariant: each shown value of a token is its recorded one. A channel (mask, log-probability, …) without a value for a
token is null there, and `missing` gives the reason for a whole rollout.

    stream   tokens  What is 3+4? | I call … | 7 | The answer …        one stream a sequence; without sequences, one a chain
             mask    0000000000000 111111111  0   11111111111         of turns
             turn    0000000000000 000000000  1   11111111111
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds

from roundhouse.plugins.view.catalog import Catalog, Scope, ViewError
from roundhouse.plugins.view.index import Indexes
from roundhouse.sql.database import COLUMNS
from roundhouse.sql.parts import StageFiles, columns_found, dataset_of
from roundhouse.store.stage import StageKind
from roundhouse.trajectories.schemas import QUARANTINE, ROLLOUTS, SEQUENCES, TURNS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

MOST_QUARANTINED = 2000
"""Rows of the quarantine that are shown."""
_PART = re.compile(r"rollouts-(a[^/]+\.parquet)$")


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
                f"Rollout {rollout_id!r} does not exist in iteration {iteration} of {scope.run_id} ({scope.stage})."
            )
        stages = {stage.stage: stage for stage in index.stages if stage.iteration == iteration}
        own = stages[scope.stage]
        [row] = _rows_of(own, "rollouts", ROLLOUTS, rollout_id, only=file)
        # Collection writes the turns of a part of rollouts as a part of the same number. Otherwise, all parts are
        # read.
        match = _PART.search(file)
        turn_rows = _rows_of(own, "turns", TURNS, rollout_id, only=f"turns-{match[1]}") if match else []
        turns = sorted(turn_rows or _rows_of(own, "turns", TURNS, rollout_id), key=lambda turn: turn["turn"])
        sequences, columns, refused = _trained(stages, rollout_id)
        streams = streams_of(turns, sequences, columns)
        decoder = self.decoder(scope.run_id)
        for stream in streams:
            stream["texts"] = None if decoder is None else decoder.texts(stream["ids"])
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
            "turns": [_shown_turn(turn) for turn in turns],
            "columns": [
                {name: value for name, value in row.items() if not isinstance(value, list | dict)} for row in columns
            ],
            "streams": streams,
            "missing": missing("dataset" if own.dataset else scope.stage, complete, iteration, verdict, streams),
            "siblings": [
                {name: member[name] for name in ("rollout_id", "sample", "reward", "status", "reason", "advantage")}
                for member in index.members(row["group_id"], exact=True, iteration=iteration)
            ],
        }

    def group(
        self, scope: Scope, group: str, *, exact: bool = True, iteration: int | None = None, limit: int = 64
    ) -> list[dict[str, Any]]:
        """The rollouts of a group with their conversations, for a look at them side by side; `iteration` keeps those of one."""
        index = self._indexes.at(scope)
        members = index.members(group, exact=exact, iteration=iteration)[:limit]
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

    def quarantined(self, scope: Scope) -> list[dict[str, Any]]:
        """Return the rollouts that validation excluded, with the evidence."""
        stages = [stage for stage in self._indexes.at(scope).stages if stage.stage == StageKind.VALIDATE]
        names = ["iteration", *QUARANTINE.names]
        return dataset_of(stages, "quarantine", QUARANTINE).head(MOST_QUARANTINED, columns=names).to_pylist()

    def _load_decoder(self, run_id: str) -> Decoder | None:
        data = self._catalog.tokenizer_file(run_id)
        try:
            return None if data is None else Decoder(data)
        except Exception as error:  # noqa: BLE001 - a file of the store: the library raises errors of any type
            logger.warning(
                "The tokenizer of run %s cannot be read, so that its tokens are shown as IDs: %s", run_id, error
            )
            return None


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
    table = scanned.to_table(columns=names, filter=ds.field("rollout_id") == rollout_id)
    return table.to_pylist(maps_as_pydicts="lossy")


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


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """The JSON columns as JSON, without the files of images, which they name."""
    readable = {name: value for name, value in row.items() if name != "images"}
    for name in ("messages", "task"):
        if row.get(name) is not None:
            with contextlib.suppress(ValueError):
                readable[name] = json.loads(row[name])
    return readable


def _shown_turn(turn: dict[str, Any]) -> dict[str, Any]:
    lengths = {
        "new_tokens": len(turn["prompt_token_ids"] or ()),
        "generated_tokens": len(turn["generation_token_ids"] or ()),
    }
    names = ("turn", "parent", "prompt_length", "policy_version", "finish_reason", "latency_seconds", "trained")
    return {name: turn[name] for name in names} | lengths


Stream = dict[str, Any]
Row = dict[str, Any]


def streams_of(turns: Sequence[Row], sequences: Sequence[Row], columns: Sequence[Row]) -> list[Stream]:
    """Return the rollout's streams: its training sequences, or without these the chains of its turns.

    Args:
        turns, sequences, columns: the rollout's rows of these datasets.
    """
    ordered = sorted(turns, key=lambda turn: turn["turn"])
    chains = [_chain_stream(chain) for chain in chains_of(ordered)]
    if not sequences:
        return chains
    beside = {row["sequence_id"]: row for row in columns}
    return [_sequence_stream(sequence, beside.get(sequence["sequence_id"]), chains) for sequence in sequences]


def chains_of(turns: Sequence[Row]) -> list[list[Row]]:
    """Return chains of turns that continue one another; a branch starts a separate chain, with the turns before it."""
    by_number = {turn["turn"]: turn for turn in turns}
    parents = {turn["parent"] for turn in turns if turn["parent"] is not None}
    chains = []
    for leaf in (turn for turn in turns if turn["turn"] not in parents):
        chain, seen = [leaf], {leaf["turn"]}
        while (parent := chain[0]["parent"]) in by_number and parent not in seen:
            seen.add(parent)
            chain.insert(0, by_number[parent])
        chains.append(chain)
    return chains


def _chain_stream(chain: Sequence[Row]) -> Stream:
    ids: list[int] = []
    log_probs: list[float | None] = []
    turn_of: list[int] = []
    generated: list[int] = []
    versions: list[int | None] = []
    for turn in chain:
        new, reply_tokens = turn["prompt_token_ids"] or [], turn["generation_token_ids"] or []
        ids += [*new, *reply_tokens]
        recorded = list(turn["generation_log_probs"] or [])[: len(reply_tokens)]
        log_probs += [*[None] * len(new), *recorded, *[None] * (len(reply_tokens) - len(recorded))]
        turn_of += [turn["turn"]] * (len(new) + len(reply_tokens))
        generated += [*[0] * len(new), *[1] * len(reply_tokens)]
        versions += [*[None] * len(new), *[turn["policy_version"]] * len(reply_tokens)]
    return {
        "sequence_id": None,
        "ids": ids,
        "turn": turn_of,
        "generated": generated,
        "logprob": log_probs,
        "version": versions,
        "mask": None,
        "trainer_logprob": None,
        "advantage": None,
        "trained": None,
    }


def _sequence_stream(sequence: Row, columns: Row | None, chains: Sequence[Stream]) -> Stream:
    ids, mask = sequence["token_ids"], sequence["loss_mask"]
    origin = next((chain for chain in chains if chain["ids"][: len(ids)] == ids), None)

    def masked(values: Sequence[Any] | None) -> list[Any] | None:
        return None if values is None else [value if on else None for value, on in zip(values, mask, strict=True)]

    versions: list[int | None] = [None] * len(ids)
    for span in sequence["version_spans"] or []:
        for place in range(span["start"], min(span["end"], len(ids))):
            versions[place] = span["version"]
    beside = columns or {}
    advantage = beside.get("advantage")
    return {
        "sequence_id": sequence["sequence_id"],
        "ids": ids,
        "turn": origin["turn"][: len(ids)] if origin else None,
        "generated": origin["generated"][: len(ids)] if origin else mask,
        "logprob": masked(sequence["gen_logprobs"]),
        "version": masked(versions),
        "mask": mask,
        "trainer_logprob": masked(beside.get("trainer_logprobs")),
        "advantage": None if advantage is None else masked([advantage] * len(ids)),
        "trained": beside.get("trained"),
    }


def missing(
    stage: str, complete: dict[str, bool], iteration: int, refused: Row | None, streams: Sequence[Stream]
) -> dict[str, str]:
    """Return the reason for each channel without values, by name; pure.

    Args:
        stage: collect, evaluate, or `dataset` for a collection outside a run.
        complete: whether the stages of the iteration are complete, by name.
        refused: the rollout's quarantine row.
    """
    if not streams or not any(stream["ids"] for stream in streams):
        return dict.fromkeys(("mask", "logprob", "version", "advantage", "ratio"), "The rollout has no tokens.")
    reasons: dict[str, str] = {}
    if all(stream["mask"] is None for stream in streams):
        reasons["mask"] = _no_mask(stage, complete, iteration, refused)
    if all(stream["advantage"] is None for stream in streams):
        reasons["advantage"] = _no_columns("advantages", stage, complete, iteration, refused)
    if all(stream["trainer_logprob"] is None for stream in streams):
        reasons["ratio"] = _no_columns("log-probabilities of the trainer", stage, complete, iteration, refused)
    return reasons


def _no_mask(stage: str, complete: dict[str, bool], iteration: int, refused: Row | None) -> str:
    if stage == StageKind.EVALUATE:
        return "Held-out rollouts are not trained on."
    if stage == "dataset":
        return "It was collected into a dataset. Runs that train on it show its sequences."
    if not complete.get(StageKind.VALIDATE):
        return f"Stage validate of iteration {iteration} is not complete."
    return f"Kept from training: {refused['reason']}." if refused else "It became no training sequence."


def _no_columns(what: str, stage: str, complete: dict[str, bool], iteration: int, refused: Row | None) -> str:
    if stage in (StageKind.EVALUATE, "dataset") or not complete.get(StageKind.VALIDATE) or refused:
        return _no_mask(stage, complete, iteration, refused)
    if not complete.get(StageKind.TRAIN):
        return f"Stage train of iteration {iteration} is not complete."
    return f"The train stage recorded no {what} for it."


_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Decoder:
    """A vocabulary with a cache of decoded tokens."""

    def __init__(self, tokenizer_file: bytes) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_file)
        # Decoders of some vocabularies strip the space in front of a first token. So no token is decoded as the first.
        self._before = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._prefix = self._text(self._before)
        self._known: dict[int, str] = {}
        self._lock = threading.Lock()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        with self._lock:
            for token in set(ids) - self._known.keys():
                if token < 0 or (piece := self._tokenizer.id_to_token(token)) is None:
                    self._known[token] = f"<{token}?>"
                else:
                    text = self._text([*self._before, token]).removeprefix(self._prefix)
                    self._known[token] = piece if _BROKEN in text or not text else text
            return [self._known[token] for token in ids]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
