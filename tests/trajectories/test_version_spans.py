"""The version of each sampled token is recorded: through Parquet, into sequences, and proved before training."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from roundhouse.store.location import Location
from roundhouse.store.stage import read_part
from roundhouse.trajectories.schemas import (
    TURNS,
    chains_of,
    rollouts_from_tables,
    rollouts_table,
    sequences_table,
    turns_table,
)
from roundhouse.trajectories.validation import CollectionLimits, Refusal, prove_turn
from tests.trajectories.rollouts import rollout, turn

SPANS = [{"version": 3, "tokens": 1}, {"version": 4, "tokens": 2}]


def in_flight():
    one = turn(0, [], [1, 2], [3, 4, 5])
    one.policy_version, one.version_spans = 3, SPANS
    two = turn(1, [1, 2, 3, 4, 5], [6], [7])
    two.policy_version = 4
    made = rollout("g", 0)
    made.turns = [one, two]
    return made


def test_spans_survive_the_way_through_arrow_and_the_rollout_knows_its_oldest_and_newest_version() -> None:
    rollouts, turns = rollouts_table([in_flight()]), turns_table([in_flight()])
    (again,) = rollouts_from_tables(rollouts, turns)
    assert [one.version_spans for one in again.turns] == [SPANS, None]
    row = rollouts.to_pylist()[0]
    assert (row["policy_version_first"], row["policy_version_last"]) == (3, 4)


def test_a_sequence_says_which_version_drew_which_position_and_is_as_old_as_its_oldest_token() -> None:
    made = in_flight()
    (row,) = sequences_table([(made, chains_of(made.turns))]).to_pylist()
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert row["version_spans"] == [{"version": 3, "start": 2, "end": 3}, {"version": 4, "start": 3, "end": 7}]
    assert row["policy_version"] == 3


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"version": 3, "tokens": 2}],
        [{"version": 3, "tokens": 3}, {"version": 4, "tokens": 0}],
        [{"version": 4, "tokens": 1}, {"version": 5, "tokens": 2}],
    ],
)
def test_spans_that_do_not_cover_the_tokens_or_hide_the_oldest_version_are_refused(spans: list[dict[str, int]]) -> None:
    terms = CollectionLimits(vocabulary_size=100, policy_version=3)
    one = in_flight().turns[0]
    prove_turn(one, terms)
    with pytest.raises(Refusal, match="version"):
        prove_turn(replace(one, version_spans=spans), terms)


def test_a_part_of_before_the_spans_is_read_with_none(tmp_path: Path) -> None:
    old = turns_table([in_flight()]).drop_columns(["version_spans"])
    sink = io.BytesIO()
    pq.write_table(old, sink, write_page_checksum=True)
    place = Location(str(tmp_path))
    place.write("turns.parquet", sink.getvalue())
    read = read_part(place, "turns.parquet", TURNS)
    assert read is not None
    assert read.column("version_spans").null_count == 2
    assert read.column("generation_token_ids").to_pylist() == [[3, 4, 5], [7]]
