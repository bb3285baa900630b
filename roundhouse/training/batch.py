"""The sequences of one iteration, as flat arrays.

Invariant: every array over tokens has length `offsets[-1]`, sequence s owns the slice `offsets[s]:offsets[s + 1]`, each
sequence has at least one trained token and never trains on its first one (nothing predicts it), and every number that
training reads is finite. Ragged data stays flat: no padding exists before a microbatch is built for the device.

    token_ids   [ 5 9 7 2 | 5 9 4 ]        offsets [0, 4, 7]
    loss_mask   [ 0 0 1 1 | 0 0 1 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from roundhouse.config.rollout import LARGEST_REWARD
from roundhouse.errors import DataError

if TYPE_CHECKING:
    from roundhouse.training.algorithms import TokenSignals

SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("gen_logprobs", pa.list_(pa.float32())),
        ("policy_version", pa.int32()),
        ("reward", pa.float64()),
    ]
)
"""The columns of the `sequences` dataset that training needs. There may be more columns."""

OPTIONAL = pa.schema(
    [
        ("truncated", pa.bool_()),
        ("reward_components", pa.map_(pa.string(), pa.float64())),
        ("rollout_generated_tokens", pa.int32()),
        ("branched_from", pa.string()),
        ("turn_rewards", pa.list_(pa.struct([("end", pa.int32()), ("reward", pa.float64())]))),
        ("images", pa.list_(pa.struct([("sha256", pa.string()), ("data", pa.binary())]))),
    ]
)
"""Optional columns of training: datasets without them, or with nulls in them, stay readable."""


@dataclass(frozen=True, slots=True)
class TrainingSequences:
    """S sequences with T tokens in all."""

    sequence_ids: list[str]
    rollout_ids: list[str]
    group_ids: list[str]
    rewards: np.ndarray
    """[S] float64, finite."""
    policy_versions: np.ndarray
    """[S] int64: the weights that generated the sequence."""
    offsets: np.ndarray
    """[S + 1] int64: start of each sequence in the token arrays."""
    token_ids: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] bool: true on generated tokens."""
    gen_logprobs: np.ndarray
    """[T] float32: the engine's log-probability of the token; 0 off the mask."""
    truncated: np.ndarray
    """[S] bool: a limit of turns or tokens ended the rollout."""
    generated_tokens: np.ndarray
    """[S] int64: tokens that the sequence's whole rollout generated, in all its turns and sequences."""
    reward_components: dict[str, np.ndarray]
    """[S] float64 by name: parts of the reward; NaN for missing parts."""
    branched_from: list[str | None]
    """[S]: for a branch, the ID of the source rollout that its group is compared with, if it is among these."""
    turn_rewards: list[list[tuple[int, float]]]
    """[S]: rewards of single turns, in order: the turn's end position in the sequence, and its part."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """[S]: image files of the sequence's runs of placeholders; empty if no sequence has any."""

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @property
    def lengths(self) -> np.ndarray:
        """[S] tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def sequence_of_token(self) -> np.ndarray:
        """[T] index of the sequence that owns each token."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def sampled(self) -> bool:
        """Return whether an engine's log-probabilities are recorded; all are 0 in written conversations."""
        return bool(self.gen_logprobs.any())

    def select(self, chosen: np.ndarray) -> TrainingSequences:
        """Return the sequences with `chosen` ([S] bool), at least one, in the same order; with the reward components
        that any of them has."""
        tokens = np.repeat(chosen, self.lengths)
        places = np.flatnonzero(chosen)
        return TrainingSequences(
            sequence_ids=[self.sequence_ids[place] for place in places],
            rollout_ids=[self.rollout_ids[place] for place in places],
            group_ids=[self.group_ids[place] for place in places],
            rewards=self.rewards[chosen],
            policy_versions=self.policy_versions[chosen],
            offsets=np.concatenate([[0], np.cumsum(self.lengths[chosen])]),
            token_ids=self.token_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            gen_logprobs=self.gen_logprobs[tokens],
            truncated=self.truncated[chosen],
            generated_tokens=self.generated_tokens[chosen],
            reward_components={
                name: values[chosen]
                for name, values in self.reward_components.items()
                if not np.isnan(values[chosen]).all()
            },
            branched_from=[self.branched_from[place] for place in places],
            turn_rewards=[self.turn_rewards[place] for place in places],
            images=tuple(self.images[place] for place in places) if self.images else (),
        )

    @classmethod
    def from_table(cls, table: pa.Table) -> TrainingSequences:
        """Read the columns of `SCHEMA` and check them.

        Raises:
            DataError: a column is missing or has nulls; the table is empty; mask, log-probabilities and tokens differ in
                length; a mask trains nothing, trains the first token or holds anything but 0 and 1; a reward or a
                log-probability of a trained token is not finite; an id repeats; a rollout is in two groups.
        """
        columns = {field.name: _column(table, field) for field in SCHEMA}
        if table.num_rows == 0:
            raise DataError("The iteration has no sequences to train on. See the reasons in its quarantine.")
        ids = columns["sequence_id"].to_pylist()
        lengths = _equal_lengths(columns, ids)
        mask = _flat(columns["loss_mask"])
        truncated = np.zeros(len(ids), dtype=bool)
        if "truncated" in table.column_names:
            truncated = np.array([bool(value) for value in table.column("truncated").to_pylist()], dtype=bool)
        sequences = cls(
            sequence_ids=ids,
            rollout_ids=columns["rollout_id"].to_pylist(),
            group_ids=columns["group_id"].to_pylist(),
            rewards=columns["reward"].to_numpy(zero_copy_only=False),
            policy_versions=columns["policy_version"].to_numpy(zero_copy_only=False).astype(np.int64),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            token_ids=_flat(columns["token_ids"]),
            loss_mask=mask == 1,
            gen_logprobs=np.where(mask == 1, _flat(columns["gen_logprobs"]), np.float32(0)),
            truncated=truncated,
            generated_tokens=_generated_tokens(table, columns["rollout_id"].to_pylist(), mask == 1, lengths),
            reward_components=_reward_components(table),
            branched_from=_branched_from(table),
            turn_rewards=_turn_rewards(table),
            images=_images(table),
        )
        sequences._check(mask)
        return sequences

    @classmethod
    def from_records(cls, records: Sequence[dict[str, Any]]) -> TrainingSequences:
        """The same from Python dictionaries, for small inputs."""
        return cls.from_table(pa.Table.from_pylist(list(records), schema=pa.schema([*SCHEMA, *OPTIONAL])))

    def _check(self, mask: np.ndarray) -> None:
        owner = self.sequence_of_token
        self._refuse(owner[(mask != 0) & (mask != 1)], "loss_mask holds a value other than 0 and 1")
        self._refuse(owner[self.token_ids < 0], "token_ids holds a negative id")
        first = self.offsets[:-1]
        self._refuse(np.flatnonzero(self.loss_mask[first]), "loss_mask trains the first token, which nothing predicts")
        trained = np.add.reduceat(self.loss_mask.astype(np.int64), first)
        self._refuse(np.flatnonzero(trained == 0), "loss_mask trains no token")
        self._refuse(owner[~np.isfinite(self.gen_logprobs)], "gen_logprobs of a trained token is not finite")
        too_large = ~(np.abs(self.rewards) <= LARGEST_REWARD)  # a comparison that NaN fails
        self._refuse(np.flatnonzero(too_large), f"the reward is not finite, or above {LARGEST_REWARD:g} in size")
        if len(set(self.sequence_ids)) < len(self):
            repeated = next(name for name in self.sequence_ids if self.sequence_ids.count(name) > 1)
            raise DataError(f"sequence_id {repeated!r} occurs more than once. Every sequence needs its own.")
        group_of: dict[str, str] = {}
        for rollout, group in zip(self.rollout_ids, self.group_ids, strict=True):
            if group_of.setdefault(rollout, group) != group:
                raise DataError(
                    f"rollout_id {rollout!r} is in the groups {group_of[rollout]!r} and {group!r}. "
                    "A rollout belongs to one group."
                )

    def _refuse(self, sequences: np.ndarray, reason: str) -> None:
        if len(sequences):
            affected = len(np.unique(sequences))
            raise DataError(
                f"sequence {self.sequence_ids[sequences[0]]!r}: {reason} ({affected} of {len(self)} sequences affected). "
                "Validation should have put it in quarantine."
            )


def _column(table: pa.Table, field: pa.Field) -> pa.Array:
    if field.name not in table.column_names:
        raise DataError(
            f"The sequences have no column {field.name!r} (found: {', '.join(table.column_names)}). "
            f"Training needs {', '.join(SCHEMA.names)}."
        )
    column = table.column(field.name).combine_chunks()
    if column.null_count:
        raise DataError(
            f"Column {field.name!r} of the sequences holds {column.null_count} nulls; every value is needed."
        )
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise DataError(f"Column {field.name!r} of the sequences is not of type {field.type}: {error}") from error


def _generated_tokens(table: pa.Table, rollouts: list[str], mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Read the column; if it is missing, count the tokens on the masks of the rollout's sequences."""
    trained = np.add.reduceat(mask.astype(np.int64), np.cumsum(lengths) - lengths)
    totals: dict[str, int] = {}
    for rollout, count in zip(rollouts, trained.tolist(), strict=True):
        totals[rollout] = totals.get(rollout, 0) + count
    name = "rollout_generated_tokens"
    recorded = table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
    counts = [totals[rollout] if value is None else value for rollout, value in zip(rollouts, recorded, strict=True)]
    return np.array(counts, dtype=np.int64)


def _branched_from(table: pa.Table) -> list[str | None]:
    name = "branched_from"
    return table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows


def _turn_rewards(table: pa.Table) -> list[list[tuple[int, float]]]:
    name = "turn_rewards"
    rows = table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
    return [[(part["end"], part["reward"]) for part in row or ()] for row in rows]


def _images(table: pa.Table) -> tuple[tuple[bytes, ...], ...]:
    rows = table.column("images").to_pylist() if "images" in table.column_names else []
    return tuple(tuple(image["data"] for image in row or ()) for row in rows) if any(rows) else ()


def _reward_components(table: pa.Table) -> dict[str, np.ndarray]:
    if "reward_components" not in table.column_names:
        return {}
    rows = [dict(row or ()) for row in table.column("reward_components").to_pylist()]
    names = sorted({name for row in rows for name in row})
    return {name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names}


def _equal_lengths(columns: dict[str, pa.Array], ids: list[str]) -> np.ndarray:
    lengths = {name: np.diff(columns[name].offsets.to_numpy()) for name in ("token_ids", "loss_mask", "gen_logprobs")}
    tokens = lengths["token_ids"]
    if (tokens == 0).any():
        raise DataError(f"sequence {ids[int(np.argmax(tokens == 0))]!r} has no tokens.")
    for name in ("loss_mask", "gen_logprobs"):
        differing = np.flatnonzero(lengths[name] != tokens)
        if len(differing):
            s = differing[0]
            raise DataError(
                f"sequence {ids[s]!r}: {name} has {lengths[name][s]} values for {tokens[s]} token_ids. "
                "They must be equally long."
            )
    return tokens


def _flat(column: pa.ListArray) -> np.ndarray:
    values = column.flatten()  # unlike `.values`, respects a slice's window
    if values.null_count:
        raise DataError(
            f"A list column of the sequences holds {values.null_count} null elements; every value is needed."
        )
    return values.to_numpy(zero_copy_only=False)


def sequence_rows(
    sequences: TrainingSequences, signals: TokenSignals, measured: np.ndarray, old_log_probs: np.ndarray
) -> pa.Table:
    """Return one row a sequence: IDs, reward, the algorithm's columns, and the trainer's log-probabilities.

    `measured` [T] marks the tokens with a computed log-probability. `trainer_logprobs` is null for a sequence without
    any, else one value a token from before the first update, null if it was not computed.
    """
    first = sequences.offsets[:-1]
    trained = np.add.reduceat(signals.columns.trained.astype(np.int64), first)
    counts = np.add.reduceat(measured.astype(np.int64), first)
    error = np.where(measured, np.exp(np.abs(old_log_probs - sequences.gen_logprobs), dtype=np.float64), 0)
    errors = np.add.reduceat(error, first) / np.maximum(counts, 1)
    unmeasured = counts == 0
    log_probs = pa.ListArray.from_arrays(
        pa.array(sequences.offsets, pa.int32()),
        pa.array(old_log_probs, pa.float32(), mask=~measured),
        mask=pa.array(unmeasured),
    )
    return pa.table(
        {
            "sequence_id": sequences.sequence_ids,
            "rollout_id": sequences.rollout_ids,
            "group_id": sequences.group_ids,
            "reward": sequences.rewards,
            **signals.sequence_columns,
            "trained": trained > 0,
            "tokens": sequences.lengths,
            "trained_tokens": trained,
            "token_mult_prob_error": pa.array(errors, mask=unmeasured),
            "trainer_logprobs": log_probs,
        }
    )
