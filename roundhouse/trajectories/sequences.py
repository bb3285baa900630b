"""From proved turns to training sequences: tokens, loss mask and log-probabilities, flat until they are a table.

Invariant: the loss mask is 1 exactly on the generated tokens of trained turns, the log-probabilities there are those that the
engine returned, and 0 everywhere else; a sequence is a run of turns that continue one another.

    turn 0: prompt [1, 2], generates [3, 4]     token_ids  1 2 3 4 5 6
    turn 1: adds [5], generates [6]             loss_mask  0 0 1 1 0 1

The train stage adds the log-probabilities of these tokens under the weights that the step began from. A token that it did not
compute is null, never 0: a policy that is certain of a token gives it a log-probability of exactly 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from roundhouse.trajectories.proofs import Refusal
from roundhouse.trajectories.records import Rollout, Status, Turn
from roundhouse.trajectories.schemas import SEQUENCES

Chain = list[Turn]
"""Turns that continue one another."""


def chains_of(turns: Sequence[Turn], on_break: Literal["reject", "truncate", "split"]) -> list[Chain]:
    """The chains with a trained turn; more than one only under `split`.

    Raises:
        Refusal: a break under `reject`, a branch under `split`, or no turn is trained.
    """
    chains: list[Chain] = [[turns[0]]]
    for turn in turns[1:]:
        if turn.parent == turn.turn - 1:
            chains[-1].append(turn)
            continue
        if on_break == "reject":
            raise Refusal("not_contiguous", "the prompt does not continue the recorded tokens", turn.turn)
        if on_break == "truncate":
            break
        if turn.parent is not None:
            raise Refusal("branch", f"turn {turn.turn} branches off turn {turn.parent}", turn.turn)
        chains.append([turn])
    trained = [chain for chain in chains if any(turn.trained for turn in chain)]
    if not trained:
        raise Refusal("nothing_trained", "no model call of the rollout is to be trained on")
    return trained


def sequences_table(accepted: Iterable[tuple[Rollout, list[Chain]]]) -> pa.Table:
    """One row a chain."""
    offsets, tokens, mask, log_probs = array("i", [0]), array("i"), bytearray(), array("f")
    rows = []
    for rollout, chains in accepted:
        generated = sum(len(turn.generation_token_ids) for turn in rollout.turns)
        for index, chain in enumerate(chains):
            spans = _append(chain, tokens, mask, log_probs)
            offsets.append(len(tokens))
            rows.append(
                {
                    "sequence_id": f"{rollout.rollout_id}/{index}",
                    "rollout_id": rollout.rollout_id,
                    "group_id": rollout.group_id,
                    "policy_version": min(span["version"] for span in spans),
                    "version_spans": spans,
                    "reward": rollout.reward,
                    "truncated": rollout.status is Status.TRUNCATED,
                    "reward_components": list(rollout.reward_components.items()),
                    "rollout_generated_tokens": generated,
                }
            )
    flat = {
        "token_ids": np.frombuffer(tokens, np.int32),
        "loss_mask": np.frombuffer(mask, np.int8),
        "gen_logprobs": np.frombuffer(log_probs, np.float32),
    }
    plain = pa.Table.from_pylist(rows, schema=pa.schema([field for field in SEQUENCES if field.name not in flat]))
    bounds = pa.array(np.frombuffer(offsets, np.int32))
    columns = [
        pa.ListArray.from_arrays(bounds, pa.array(flat[name])) if name in flat else plain.column(name)
        for name in SEQUENCES.names
    ]
    return pa.Table.from_arrays(columns, schema=SEQUENCES)


def _append(chain: Chain, tokens: array[int], mask: bytearray, log_probs: array[float]) -> list[dict[str, int]]:
    """Add the chain's tokens to the flat columns; its policy versions as spans of positions in the sequence."""
    begin = len(tokens)
    spans: list[dict[str, int]] = []
    for turn in chain:
        new, generated = len(turn.prompt_token_ids), len(turn.generation_token_ids)
        start = len(tokens) - begin + new
        tokens.extend(turn.prompt_token_ids)
        tokens.extend(turn.generation_token_ids)
        mask.extend(bytes(new) + (b"\1" if turn.trained else b"\0") * generated)
        log_probs.frombytes(bytes(4 * new))
        if turn.trained:
            log_probs.extend(turn.generation_log_probs)
        else:
            log_probs.frombytes(bytes(4 * generated))
        drawn = turn.version_spans or [{"version": turn.policy_version, "tokens": generated}]
        for version, count in ((span["version"], span["tokens"]) for span in drawn):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = start + count
            else:
                spans.append({"version": version, "start": start, "end": start + count})
            start += count
    return spans


def misaligned(table: pa.Table, accepted: Sequence[tuple[Rollout, list[Chain]]]) -> dict[str, str]:
    """Rollout ids of the table's sequences that do not carry exactly what their trained turns say, with the evidence.

    Read from the finished table, not from what built it: it is the last look before training.
    """
    chains = [(rollout.rollout_id, chain) for rollout, own in accepted for chain in own]
    wanted = array("i", [0]), array("i"), array("f")
    for _, chain in chains:
        for turn in chain:
            if turn.trained:
                wanted[1].extend(turn.generation_token_ids)
                wanted[2].extend(turn.generation_log_probs)
        wanted[0].append(len(wanted[1]))
    counts = np.diff(np.frombuffer(wanted[0], np.int32))
    columns = {name: table.column(name).combine_chunks() for name in ("token_ids", "loss_mask", "gen_logprobs")}
    bounds = columns["token_ids"].offsets.to_numpy()
    owner = np.repeat(np.arange(len(chains)), np.diff(bounds))
    mask = columns["loss_mask"].flatten().to_numpy()
    log_probs = columns["gen_logprobs"].flatten().to_numpy()
    tokens = columns["token_ids"].flatten().to_numpy()
    found: dict[str, str] = {}

    def note(sequences: np.ndarray, evidence: str) -> None:
        for index in np.unique(sequences).tolist():
            found.setdefault(chains[index][0], evidence)

    if not len(mask) == len(log_probs) == len(tokens):
        note(np.arange(len(chains)), "tokens, mask and log-probabilities differ in length")
        return found
    on = mask == 1
    note(owner[~on & (mask != 0)], "the mask holds another number than 0 and 1")
    note(owner[~on & (log_probs != 0)], "a log-probability stands off the mask")
    trained = np.bincount(owner[on], minlength=len(chains))
    note(np.flatnonzero(trained != counts), "the mask covers another number of tokens than was generated")
    if not found:
        source = np.repeat(np.arange(len(chains)), counts)
        note(source[tokens[on] != np.frombuffer(wanted[1], np.int32)], "the mask does not lie on the generated tokens")
        note(source[log_probs[on] != np.frombuffer(wanted[2], np.float32)], "a log-probability is not the engine's")
    return found


FEWEST_TOKENS = 16
"""Where a sequence is judged by its mean difference, a shorter one counts as this long: one unlikely token, where rounding
shows most, is no evidence."""


def computed_log_probs(row: pa.ListScalar) -> tuple[np.ndarray, np.ndarray]:
    """A valid row of the column `trainer_logprobs`: [n] float32, 0 where not computed, and [n] bool, where it was.

    Stores of before hold 0 in place of null. They are told by the first token, which nothing predicts: it is null in all
    others.
    """
    values = row.values
    if values.null_count:
        return values.fill_null(0).to_numpy(), values.is_valid().to_numpy(zero_copy_only=False)
    old = values.to_numpy()
    return old, old != 0


def tolerances(versions: np.ndarray, policy_version: int, tolerance: float | None) -> np.ndarray | None:
    """[S] float32: how far recorded and recomputed log-probabilities of each sequence may be apart, 0 where that is not judged
    because another version generated it; None where nothing is."""
    return None if tolerance is None else np.where(versions == policy_version, tolerance, 0).astype(np.float32)
