from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from roundhouse.errors import DataError
from roundhouse.training.batch import OPTIONAL, SCHEMA, TrainingSequences
from roundhouse.trajectories.schemas import SEQUENCES
from tests.training.tiny import record, records


def test_flat_arrays_hold_each_sequence_in_its_slice() -> None:
    rows = records()
    batch = TrainingSequences.from_records(rows)
    for s, row in enumerate(rows):
        inside = slice(batch.offsets[s], batch.offsets[s + 1])
        assert batch.token_ids[inside].tolist() == row["token_ids"]
        assert batch.loss_mask[inside].tolist() == [bool(value) for value in row["loss_mask"]]
        np.testing.assert_allclose(batch.gen_logprobs[inside], row["gen_logprobs"], rtol=1e-6)
        assert (batch.sequence_of_token[inside] == s).all()


def test_a_slice_of_a_table_and_several_chunks_read_like_the_rows_they_hold() -> None:
    rows = records()
    whole = pa.Table.from_pylist(rows, schema=SCHEMA)
    parts = pa.concat_tables([whole.slice(3, 5), whole.slice(8, 2)])
    assert parts.column("token_ids").num_chunks == 2
    batch = TrainingSequences.from_table(parts)
    expected = TrainingSequences.from_records(rows[3:10])
    assert batch.sequence_ids == expected.sequence_ids
    np.testing.assert_array_equal(batch.token_ids, expected.token_ids)
    np.testing.assert_array_equal(batch.offsets, expected.offsets)


def test_the_sequences_dataset_has_the_columns_that_training_reads() -> None:
    for field in (*SCHEMA, *OPTIONAL):
        assert SEQUENCES.field(field.name).type == field.type


def test_log_probabilities_off_the_mask_are_ignored() -> None:
    row = record("a", "g", 1.0)
    row["gen_logprobs"] = [
        value if trained else float("nan") for value, trained in zip(row["gen_logprobs"], row["loss_mask"], strict=True)
    ]
    assert np.isfinite(TrainingSequences.from_records([row]).gen_logprobs).all()


def _with(**changes: Any) -> list[dict[str, Any]]:
    base = {
        "sequence_id": "bad",
        "rollout_id": "bad",
        "group_id": "g",
        "token_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "gen_logprobs": [0.0, -1.0, -2.0],
        "policy_version": 0,
        "reward": 1.0,
    }
    return [record("good", "g", 0.0), {**base, **changes}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_mask": [0, 1]}, "'bad': loss_mask has 2 values for 3 token_ids"),
        ({"gen_logprobs": [0.0, -1.0]}, "'bad': gen_logprobs has 2 values for 3 token_ids"),
        ({"gen_logprobs": [0.0, float("nan"), -1.0]}, "'bad': gen_logprobs of a trained token is not finite"),
        ({"gen_logprobs": [0.0, float("-inf"), -1.0]}, "'bad': gen_logprobs of a trained token is not finite"),
        ({"gen_logprobs": [0.0, None, -1.0]}, "null elements"),
        ({"loss_mask": [0, 0, 0]}, "'bad': loss_mask trains no token"),
        ({"loss_mask": [1, 1, 1]}, "'bad': loss_mask trains the first token"),
        ({"loss_mask": [0, 2, 1]}, "'bad': loss_mask holds a value other than 0 and 1"),
        ({"token_ids": [1, -2, 3]}, "'bad': token_ids holds a negative id"),
        ({"token_ids": [], "loss_mask": [], "gen_logprobs": []}, "'bad' has no tokens"),
        ({"reward": float("nan")}, "'bad': the reward is not finite"),
        ({"reward": None}, "'reward' of the sequences holds 1 nulls"),
        ({"sequence_id": "good"}, "'good' occurs more than once"),
        ({"rollout_id": "good", "group_id": "h"}, "'good' is in the groups 'g' and 'h'"),
    ],
)
def test_bad_sequences_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        TrainingSequences.from_records(_with(**changes))


def test_an_empty_table_and_a_missing_column_are_refused() -> None:
    with pytest.raises(DataError, match="no sequences"):
        TrainingSequences.from_records([])
    table = pa.Table.from_pylist(records(), schema=SCHEMA).drop_columns(["reward"])
    with pytest.raises(DataError, match="no column 'reward'"):
        TrainingSequences.from_table(table)


def test_datasets_written_before_a_column_existed_stay_readable() -> None:
    rows = [record("a/0", "g", 1.0, rollout="a"), record("a/1", "g", 1.0, rollout="a"), record("b", "g", 0.0)]
    batch = TrainingSequences.from_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    counts = [sum(row["loss_mask"]) for row in rows]
    assert batch.truncated.tolist() == [False] * 3
    assert batch.generated_tokens.tolist() == [counts[0] + counts[1]] * 2 + [counts[2]]
    assert batch.reward_components == {}


def test_reward_parts_are_columns_by_name_with_nan_where_a_rollout_has_none() -> None:
    rows = [
        record("a", "g", 1.0) | {"reward_components": {"format": 1.0, "answer": 0.0}, "truncated": True},
        record("b", "g", 0.0) | {"reward_components": {"format": 0.5}, "rollout_generated_tokens": 99},
    ]
    batch = TrainingSequences.from_records(rows)
    assert sorted(batch.reward_components) == ["answer", "format"]
    assert batch.reward_components["format"].tolist() == [1.0, 0.5]
    np.testing.assert_array_equal(batch.reward_components["answer"], [0.0, np.nan])
    assert batch.truncated.tolist() == [True, False]
    assert batch.generated_tokens[1] == 99
