"""The tokens of a rollout with everything that is known of each; pure.

Invariant: what is shown of a token is what was recorded of it, or nothing. A channel (mask, log-probability, …) that a token
has no value of is null there, and `missing` says for a whole rollout why a channel has none.

    stream   tokens  What is 3+4? | I call … | 7 | The answer …        one stream a sequence; without sequences, one a chain
             mask    0000000000000 111111111  0   11111111111         of turns
             turn    0000000000000 000000000  1   11111111111
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


from roundhouse.store.stage import StageKind

Stream = dict[str, Any]
Row = dict[str, Any]


def streams_of(turns: Sequence[Row], sequences: Sequence[Row], columns: Sequence[Row]) -> list[Stream]:
    """The rollout's streams: its training sequences, or where it has none the chains of its turns.

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
    """Turns that continue one another; a branch begins a chain of its own, with the turns that it stems from."""
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
        new, said = turn["prompt_token_ids"] or [], turn["generation_token_ids"] or []
        ids += [*new, *said]
        recorded = list(turn["generation_log_probs"] or [])[: len(said)]
        log_probs += [*[None] * len(new), *recorded, *[None] * (len(said) - len(recorded))]
        turn_of += [turn["turn"]] * (len(new) + len(said))
        generated += [*[0] * len(new), *[1] * len(said)]
        versions += [*[None] * len(new), *[turn["policy_version"]] * len(said)]
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
    trained = [bool(value) for value in mask]
    versions: list[int | None] = [None] * len(ids)
    for span in sequence["version_spans"] or []:
        for place in range(span["start"], min(span["end"], len(ids))):
            versions[place] = span["version"]
    trainer = None if columns is None else columns.get("trainer_logprobs")
    advantage = None if columns is None else columns.get("advantage")
    return {
        "sequence_id": sequence["sequence_id"],
        "ids": ids,
        "turn": origin["turn"][: len(ids)] if origin else None,
        "generated": origin["generated"][: len(ids)] if origin else mask,
        "logprob": [value if on else None for value, on in zip(sequence["gen_logprobs"], trained, strict=True)],
        "version": [version if on else None for version, on in zip(versions, trained, strict=True)],
        "mask": mask,
        "trainer_logprob": None
        if trainer is None
        else [v if on else None for v, on in zip(trainer, trained, strict=True)],
        "advantage": None if advantage is None else [advantage if on else None for on in trained],
        "trained": None if columns is None else columns.get("trained"),
    }


def missing(
    stage: str, complete: dict[str, bool], iteration: int, refused: Row | None, streams: Sequence[Stream]
) -> dict[str, str]:
    """Why each channel that has no value has none, by its name; pure.

    Args:
        stage: collect, evaluate, or `dataset` of what was collected outside a run.
        complete: whether the stages of the iteration are complete, by name.
        refused: the rollout's quarantine row.
    """
    if not streams or not any(stream["ids"] for stream in streams):
        return dict.fromkeys(("mask", "logprob", "version", "advantage", "ratio"), "The rollout has no tokens.")
    found: dict[str, str] = {}
    if all(stream["mask"] is None for stream in streams):
        found["mask"] = _no_mask(stage, complete, iteration, refused)
    if all(stream["advantage"] is None for stream in streams):
        found["advantage"] = _no_columns("advantages", stage, complete, iteration, refused)
    if all(stream["trainer_logprob"] is None for stream in streams):
        found["ratio"] = _no_columns("log-probabilities of the trainer", stage, complete, iteration, refused)
    return found


def _no_mask(stage: str, complete: dict[str, bool], iteration: int, refused: Row | None) -> str:
    if stage == StageKind.EVALUATE:
        return "Held-out rollouts are not trained on."
    if stage == "dataset":
        return "It was collected into a dataset: what a run made of it, the run shows."
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
    """A vocabulary, with what was decoded before."""

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
                self._known[token] = self._one(token)
            return [self._known[token] for token in ids]

    def _one(self, token: int) -> str:
        if token < 0 or (piece := self._tokenizer.id_to_token(token)) is None:
            return f"<{token}?>"
        text = self._text([*self._before, token]).removeprefix(self._prefix)
        return piece if _BROKEN in text or not text else text

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
