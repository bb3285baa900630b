"""Arrow schemas of the data between stages, and the conversions between records and tables.

Invariant: storage is linear in tokens. A turn stores only the tokens that its prompt adds to its parent;
`rebuild_prompts` restores whole prompts, and the stored length and digest prove that they equal the engine's.

A training sequence is one root-to-leaf path of the rollout's tree of turns (`chains_of`). Its loss mask is 1 exactly on
the generated tokens of trained turns. The log-probabilities there are the engine's, and 0 elsewhere (everywhere in
written conversations).

    turn 0: prompt [1, 2], generates [3, 4]     token_ids  1 2 3 4 5 6
    turn 1: adds [5], generates [6]             loss_mask  0 0 1 1 0 1

The train stage adds the log-probabilities of these tokens under its initial weights. A token that was not computed is
null, never 0, because a certain token has a log-probability of exactly 0.
"""

from __future__ import annotations

import itertools
import json
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roundhouse import images
from roundhouse.errors import DataError
from roundhouse.health.policy import code_of
from roundhouse.trajectories.records import FailureKind, Refusal, Rollout, Status, Turn
from roundhouse.trajectories.storable import json_text, storable_text

log = logging.getLogger(__name__)

_NUMBERS = pa.map_(pa.string(), pa.float64())

ROLLOUTS = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("sample", pa.int32()),
        ("environment", pa.string()),
        ("status", pa.string()),
        ("attempt", pa.int32()),
        ("seed", pa.int64()),
        ("reward", pa.float64()),  # null exactly for a rollout without a reward
        ("reward_components", _NUMBERS),
        ("metrics", _NUMBERS),
        ("task", pa.string()),  # JSON: the task row
        ("messages", pa.string()),  # JSON: the conversation as Responses items
        ("finish_reason", pa.string()),
        ("failure_kind", pa.string()),
        ("failure_code", pa.string()),
        ("failure_detail", pa.string()),
        ("policy_version_first", pa.int32()),
        ("policy_version_last", pa.int32()),
        ("turns", pa.int32()),
        ("generated_tokens", pa.int32()),
        ("total_tokens", pa.int32()),
        ("started_at", pa.float64()),
        ("seconds", pa.float64()),
        ("generation_seconds", pa.float64()),
        ("environment_seconds", pa.float64()),
        # for a branch, the rollout that supplied its first turns; generated_tokens then counts the new turns
        pa.field("branched_from", pa.string(), metadata={"added_later": "branches"}),
        # files of the images that task and messages name; null without any
        pa.field("images", pa.map_(pa.string(), pa.binary()), metadata={"added_later": "images"}),
    ]
)
"""One row a rollout."""

TURNS = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("turn", pa.int32()),
        ("parent", pa.int32()),  # null at a root
        ("prompt_token_ids", pa.list_(pa.int32())),  # new since the parent
        ("prompt_length", pa.int32()),  # of the whole prompt
        ("prompt_digest", pa.string()),  # of the whole prompt
        ("generation_token_ids", pa.list_(pa.int32())),
        ("generation_log_probs", pa.list_(pa.float32())),
        ("policy_version", pa.int32()),
        ("finish_reason", pa.string()),
        ("latency_seconds", pa.float64()),
        ("trained", pa.bool_()),  # false: the loss skips its tokens
        # null if one version generated all tokens
        pa.field(
            "version_spans",
            pa.list_(pa.struct([("version", pa.int32()), ("tokens", pa.int32())])),
            metadata={"added_later": "in-flight refit"},  # older datasets lack it; it reads as null
        ),
        # null if the environment gave no reward for this turn
        pa.field("reward", pa.float64(), metadata={"added_later": "rewards of turns"}),
        # names of the images that the prompt adds; null without any
        pa.field("images", pa.list_(pa.string()), metadata={"added_later": "images"}),
    ]
)
"""One row a model call."""

SEQUENCES = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),  # 1 on generated tokens of trained turns
        ("gen_logprobs", pa.list_(pa.float32())),  # 0 off the mask
        ("policy_version", pa.int32()),  # oldest version in the sequence
        ("version_spans", pa.list_(pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]))),
        ("reward", pa.float64()),
        ("truncated", pa.bool_()),
        ("reward_components", _NUMBERS),
        ("rollout_generated_tokens", pa.int32()),  # of the whole rollout, in all its turns and sequences
        # of a branch: the rollout that its group is compared with, too
        pa.field("branched_from", pa.string(), metadata={"added_later": "branches"}),
        # rewards of single turns, and the position after their last token
        pa.field(
            "turn_rewards",
            pa.list_(pa.struct([("end", pa.int32()), ("reward", pa.float64())])),
            metadata={"added_later": "rewards of turns"},
        ),
        # the images of its runs of placeholders, in order; null without any
        pa.field(
            "images",
            pa.list_(pa.struct([("sha256", pa.string()), ("data", pa.binary())])),
            metadata={"added_later": "images"},
        ),
    ]
)
"""One row a training sequence; independent of the algorithm."""

QUARANTINE = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("outcome", pa.string()),  # masked or omitted
        ("reason", pa.string()),
        ("evidence", pa.string()),
        ("turn", pa.int32()),  # null when it is about the whole rollout
    ]
)
"""One row a rollout that validation kept from training."""


class RewardOfFailure(DataError):
    """A rollout that failed, or was never started, comes with a reward."""


class UnstorableRollout(DataError):
    """A value of the rollout fits no table."""


RolloutTables = tuple[pa.Table, pa.Table]
"""The `turns` and the `rollouts` of one or more rollouts, in the order in which they are written."""


def tables_of(rollouts: Sequence[Rollout]) -> RolloutTables:
    """Return the two datasets of these rollouts."""
    return turns_table(rollouts), rollouts_table(rollouts)


def recorded_rollout(rollout: Rollout) -> tuple[Rollout, RolloutTables]:
    """Return the rollout as it is recorded, with its tables: a failure with the code `unstorable_rollout`, without turns and
    items, if a table cannot hold one of its values. One such rollout must not keep the others from the store."""
    try:
        return rollout, tables_of([rollout])
    except RewardOfFailure:
        raise
    except Exception as error:  # the rollout ends here; whatever its parts hold becomes an outcome
        log.exception("Rollout %s cannot be stored", rollout.rollout_id)
        cause = UnstorableRollout(f"A value of the rollout fits no table: {type(error).__name__}: {error}"[:2000])
        failed = Rollout(
            group_id=storable_text(rollout.group_id),
            sample=rollout.sample,
            task=_printable_task(rollout.task),
            environment=rollout.environment,
            status=Status.FAILED,
            attempt=rollout.attempt,
            seed=rollout.seed,
            failure_kind=FailureKind.DATA,
            failure_code=code_of(cause),
            failure_detail=str(cause),
            started_at=rollout.started_at,
            branched_from=rollout.branched_from,
        )
        return failed, tables_of([failed])


def _printable_task(task: dict[str, Any]) -> dict[str, Any]:
    """Return the task row as JSON, with other values as their text; its id alone if that is impossible."""
    try:
        printable: dict[str, Any] = json.loads(storable_text(json.dumps(task, default=repr, skipkeys=True)))
    except (TypeError, ValueError, RecursionError):
        printable = {"task_id": str(task.get("task_id", ""))}
    return printable


def rollouts_table(rollouts: Iterable[Rollout]) -> pa.Table:
    """The `rollouts` dataset.

    Raises:
        RewardOfFailure: a rollout without a rewarded outcome has a reward; none is ever written.
    """
    return pa.Table.from_pylist([_rollout_row(rollout) for rollout in rollouts], schema=ROLLOUTS)


def turns_table(rollouts: Iterable[Rollout]) -> pa.Table:
    """The `turns` dataset."""
    rows = [
        {"rollout_id": rollout.rollout_id, **{name: getattr(turn, name) for name in TURNS.names[1:]}}
        for rollout in rollouts
        for turn in rollout.turns
    ]
    return pa.Table.from_pylist(rows, schema=TURNS)


def rollouts_from_tables(rollouts: pa.Table, turns: pa.Table) -> list[Rollout]:
    """The records of the two datasets, in the order of `rollouts`."""
    by_rollout: dict[str, list[Turn]] = {}
    for row in turns.to_pylist():
        by_rollout.setdefault(row.pop("rollout_id"), []).append(Turn(**row))
    records = []
    for row in rollouts.to_pylist():
        files = dict(row.get("images") or ())
        own = sorted(by_rollout.get(row["rollout_id"], []), key=lambda turn: turn.turn)
        records.append(
            Rollout(
                group_id=row["group_id"],
                sample=row["sample"],
                task=json.loads(images.whole(row["task"], files)),
                environment=row["environment"],
                status=Status(row["status"]),
                attempt=row["attempt"],
                seed=row["seed"],
                reward=row["reward"],
                reward_components=dict(row["reward_components"]),
                metrics=dict(row["metrics"]),
                items=json.loads(images.whole(row["messages"], files)),
                turns=own,
                finish_reason=row["finish_reason"],
                failure_kind=FailureKind(row["failure_kind"]) if row["failure_kind"] else None,
                failure_code=row["failure_code"],
                failure_detail=row["failure_detail"],
                started_at=row["started_at"],
                seconds=row["seconds"],
                generation_seconds=row["generation_seconds"],
                environment_seconds=row["environment_seconds"],
                branched_from=row.get("branched_from"),
            )
        )
    return records


def turn_versions(turn: Turn) -> list[int]:
    """Versions that drew the turn's tokens, in order."""
    return [turn.policy_version] if not turn.version_spans else [span["version"] for span in turn.version_spans]


def rebuild_prompts(turns: Sequence[Turn]) -> list[list[int]]:
    """The whole prompt of each turn, from the stored parts.

    Example: turn 0 adds [1, 2] and generates [3]; turn 1 (parent 0) adds [4]: the prompts are [1, 2] and [1, 2, 3, 4].
    """
    prompts: list[list[int]] = []
    for turn in turns:
        if turn.parent is None:
            prompts.append(list(turn.prompt_token_ids))
        else:
            before = prompts[turn.parent] + turns[turn.parent].generation_token_ids
            prompts.append(before + turn.prompt_token_ids)
    return prompts


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    if rollout.reward is not None and not rollout.status.rewarded:
        raise RewardOfFailure(
            f"Rollout {rollout.rollout_id} is {rollout.status.value} and has reward {rollout.reward}: a failed rollout must "
            "not have a reward. It is not written. Correct the code that set it."
        )
    total = sum(len(turn.prompt_token_ids) + len(turn.generation_token_ids) for turn in rollout.turns)
    texts = {name: storable_text(getattr(rollout, name)) for name in _TEXTS}
    (task, shown), (messages, sent) = map(images.by_name, (json_text(rollout.task), json_text(rollout.items)))
    return texts | {
        "sample": rollout.sample,
        "status": rollout.status.value,
        "attempt": rollout.attempt,
        "seed": rollout.seed,
        "reward": rollout.reward,
        "reward_components": _named_numbers(rollout.reward_components),
        "metrics": _named_numbers(rollout.metrics),
        "task": task,
        "messages": messages,
        "failure_kind": rollout.failure_kind.value if rollout.failure_kind else None,
        "policy_version_first": min((turn.policy_version for turn in rollout.turns), default=None),
        "policy_version_last": max(
            (version for turn in rollout.turns for version in turn_versions(turn)), default=None
        ),
        "turns": len(rollout.turns),
        "generated_tokens": rollout.generated_tokens,
        "total_tokens": total,
        "started_at": rollout.started_at,
        "seconds": rollout.seconds,
        "generation_seconds": rollout.generation_seconds,
        "environment_seconds": rollout.environment_seconds,
        "branched_from": rollout.branched_from,
        "images": list((shown | sent).items()) or None,
    }


_TEXTS = ("rollout_id", "group_id", "environment", "finish_reason", "failure_code", "failure_detail")


def _named_numbers(numbers: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(storable_text(name), value) for name, value in numbers.items()]


def summaries_from_tables(rollouts: pa.Table, turns: pa.Table) -> list[Rollout]:
    """Outlines of the rollouts of two datasets, in the order of `rollouts`."""
    lengths = pc.fill_null(pc.list_value_length(turns["generation_token_ids"]), 0)
    blank = {name: _lists(turns, name, pa.repeat(0, turns.num_rows)) for name in _TOKENS}
    blank["generation_token_ids"] = _lists(turns, "generation_token_ids", lengths)
    texts = {"task": pa.repeat("{}", rollouts.num_rows), "messages": pa.repeat("[]", rollouts.num_rows)}
    return rollouts_from_tables(_replaced(rollouts, texts), _replaced(turns, blank))


_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def _lists(table: pa.Table, name: str, lengths: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Lists of zeros of these lengths, of the column's type."""
    kind = table.schema.field(name).type
    ends = pc.cumulative_sum(lengths.cast(pa.int32()))
    ends = ends.combine_chunks() if isinstance(ends, pa.ChunkedArray) else ends
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, pa.repeat(pa.scalar(0, kind.value_type), offsets[-1].as_py()), type=kind)


def _replaced(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, column in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), column)
    return table


Chain = list[Turn]
"""Turns that continue one another, from a root to a leaf."""


def chains_of(turns: Sequence[Turn]) -> list[Chain]:
    """The root-to-leaf paths of the tree of turns that have a turn to train on, in order of their turns.

    Invariant: each trained turn is trained in exactly one path, the first that holds it; in the others it is context.

        0 ── 1 ── 3        call 2 is a sub-agent's, call 4 continues call 1 anew
             └─── 4        paths 0 1 3, (0) (1) 4 and 2: turns in brackets are not trained
        2

    Raises:
        Refusal: no turn is trained.
    """
    parents = {turn.parent for turn in turns}
    paths = []
    for leaf in turns:
        if leaf.turn in parents:
            continue
        path, parent = [leaf.turn], leaf.parent
        while parent is not None:
            path.append(parent)
            parent = turns[parent].parent
        paths.append(path[::-1])
    chains, covered = [], set[int]()
    for path in sorted(paths):
        chain = [replace(turns[index], trained=False) if index in covered else turns[index] for index in path]
        covered.update(path)
        if any(turn.trained for turn in chain):
            chains.append(chain)
    if not chains:
        raise Refusal("nothing_trained", "no model call of the rollout is to be trained on")
    return chains


def sequences_table(accepted: Iterable[tuple[Rollout, list[Chain]]]) -> pa.Table:
    """One row a path."""
    offsets, tokens, mask, log_probs = array("i", [0]), array("i"), bytearray(), array("f")
    rows = []
    for rollout, chains in accepted:
        generated = sum(len(turn.generation_token_ids) for turn in rollout.turns)
        files = image_files(rollout)
        for index, chain in enumerate(chains):
            names = [name for turn in chain for name in turn.images or ()]
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
                    "branched_from": rollout.branched_from,
                    "turn_rewards": _turn_rewards(chain),
                    "images": [{"sha256": name, "data": files[name]} for name in names] or None,
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


def image_files(rollout: Rollout) -> dict[str, bytes]:
    """Return the files of the images that the rollout's turns name and its conversation has."""
    if not any(turn.images for turn in rollout.turns):
        return {}
    return images.by_name(json_text(rollout.items))[1]


def _turn_rewards(chain: Chain) -> list[dict[str, float]]:
    ends = itertools.accumulate(len(turn.prompt_token_ids) + len(turn.generation_token_ids) for turn in chain)
    return [
        {"end": end, "reward": turn.reward} for turn, end in zip(chain, ends, strict=True) if turn.reward is not None
    ]


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
        if turn.trained and turn.generation_log_probs:
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
    """Return rollout IDs of sequences that differ from their trained turns, with the evidence.

    This reads the finished table, not its source: it is the last check before training.
    """
    chains = [(rollout.rollout_id, chain) for rollout, own in accepted for chain in own]
    expected = array("i", [0]), array("i"), array("f")
    for _, chain in chains:
        for turn in chain:
            if turn.trained:
                expected[1].extend(turn.generation_token_ids)
                expected[2].extend(turn.generation_log_probs or [0.0] * len(turn.generation_token_ids))
        expected[0].append(len(expected[1]))
    counts = np.diff(np.frombuffer(expected[0], np.int32))
    columns = {name: table.column(name).combine_chunks() for name in ("token_ids", "loss_mask", "gen_logprobs")}
    bounds = columns["token_ids"].offsets.to_numpy()
    owner = np.repeat(np.arange(len(chains)), np.diff(bounds))
    mask = columns["loss_mask"].flatten().to_numpy()
    log_probs = columns["gen_logprobs"].flatten().to_numpy()
    tokens = columns["token_ids"].flatten().to_numpy()
    faults: dict[str, str] = {}

    def note(sequences: np.ndarray, evidence: str) -> None:
        for index in np.unique(sequences).tolist():
            faults.setdefault(chains[index][0], evidence)

    if not len(mask) == len(log_probs) == len(tokens):
        note(np.arange(len(chains)), "tokens, mask and log-probabilities differ in length")
        return faults
    on = mask == 1
    note(owner[~on & (mask != 0)], "the mask holds another number than 0 and 1")
    note(owner[~on & (log_probs != 0)], "a log-probability stands off the mask")
    trained = np.bincount(owner[on], minlength=len(chains))
    note(np.flatnonzero(trained != counts), "the mask covers another number of tokens than was generated")
    if not faults:
        source = np.repeat(np.arange(len(chains)), counts)
        note(
            source[tokens[on] != np.frombuffer(expected[1], np.int32)], "the mask does not lie on the generated tokens"
        )
        note(source[log_probs[on] != np.frombuffer(expected[2], np.float32)], "a log-probability is not the engine's")
    return faults


FEWEST_TOKENS = 16
"""Smallest length for the mean difference of a sequence: a shorter one counts as this long, because one unlikely token,
with the largest rounding error, is not evidence."""


def computed_log_probs(row: pa.ListScalar) -> tuple[np.ndarray, np.ndarray]:
    """Read a valid row of the column `trainer_logprobs`: [n] float32, 0 for missing values, and [n] bool, True for
    computed ones.

    Older stores hold 0 instead of null. They are recognised by the first token, which is never predicted and therefore
    null in newer ones.
    """
    values = row.values
    if values.null_count:
        return values.fill_null(0).to_numpy(), values.is_valid().to_numpy(zero_copy_only=False)
    old = values.to_numpy()
    return old, old != 0


def tolerances(versions: np.ndarray, policy_version: int, tolerance: float | None) -> np.ndarray | None:
    """Return the allowed difference between recorded and recomputed log-probabilities per sequence, [S] float32, 0 for
    sequences of another version, which are not judged; None if none is judged."""
    return None if tolerance is None else np.where(versions == policy_version, tolerance, 0).astype(np.float32)
