"""Nothing is lost between Parquet and NeMo Gym's files, in either direction."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundhouse.errors import DataError, StoreError
from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles, Row, line_of, read_rows, write_rows
from roundhouse.plugins.nemo_gym.exchange.reading import (
    Original,
    export_rollouts,
    originals_from_table,
    originals_table,
    read_collection,
    write_collection,
)
from roundhouse.stages.importing import import_files
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn, digest_tokens
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, turns_table
from tests.plugins.nemo_gym.exchange.strategies import datasets, foreign_rows

slow = settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))


def through_parquet(rollouts: list[Rollout], originals: list[Original]) -> tuple[list[Rollout], list[Original]]:
    records = rollouts_from_tables(rollouts_table(rollouts), turns_table(rollouts))
    return records, originals_from_table(originals_table(originals))


def written(directory: str | Path, rollouts: list[Rollout], originals: list[Original]) -> CollectionFiles:
    files = CollectionFiles(Path(directory) / "rollouts.jsonl")
    write_collection(rollouts, originals, files)
    return files


@slow
@given(datasets())
def test_parquet_to_json_lines_to_parquet_gives_the_same_tables(rollouts: list[Rollout]):
    with TemporaryDirectory() as directory:
        back = read_collection(written(directory, rollouts, []))
    assert rollouts_table(back.rollouts).equals(rollouts_table(rollouts))
    assert turns_table(back.rollouts).equals(turns_table(rollouts))
    assert back.originals == []


@slow
@given(foreign_rows())
def test_json_lines_to_parquet_to_json_lines_gives_the_same_rows(rows: list[Row]):
    with TemporaryDirectory() as directory:
        before = CollectionFiles(Path(directory) / "theirs.jsonl")
        write_rows(before.rollouts, rows)
        read = read_collection(before)
        after = written(directory, *through_parquet(read.rollouts, read.originals))
        assert canonical(after.rollouts) == canonical(before.rollouts)


@slow
@given(datasets(), st.randoms())
def test_files_of_ours_that_were_cut_and_shuffled_come_back_as_they_are(rollouts: list[Rollout], chance: Random):
    with TemporaryDirectory() as directory:
        before = written(directory, rollouts, [])
        for path in paths(before):
            rows = [row for row in read_rows(path) if chance.random() < 0.8]
            chance.shuffle(rows)
            write_rows(path, rows)
        read = read_collection(before)
        after = written(f"{directory}/after", *through_parquet(read.rollouts, read.originals))
        for one, other in zip(paths(after), paths(before), strict=True):
            assert canonical(one) == canonical(other)


def paths(files: CollectionFiles) -> tuple[Path, Path, Path]:
    return files.rollouts, files.failures, files.materialized_inputs


def canonical(path: Path) -> list[str]:
    """The rows as text with sorted keys, so that 1, 1.0 and true are three things."""
    return [json.dumps(row, sort_keys=True) for row in read_rows(path)]


def call(prompt: list[int], generated: list[int]) -> Row:
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": [-0.5] * len(generated),
    }


THEIR_RESULT: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "2*3?", "type": "message"}], "temperature": None},
    "response": {
        "id": "resp_1",
        "status": "completed",
        "output": [
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "mul", "arguments": "{}", **call([1, 2], [3])},
            {"type": "function_call_output", "call_id": "c", "output": "6"},
            {"type": "message", "role": "assistant", "content": "6", **call([1, 2, 3, 4], [5]), "routed_experts": None},
        ],
        "usage": {"input_tokens": 6, "output_tokens": 2},
    },
    "reward": 1.0,
    "extracted_answer": "6",
    "answer_words": 1,
    "_ng_task_index": 0,
    "_ng_rollout_index": 0,
    "agent_ref": {"type": "responses_api_agents", "name": "math"},
}  # fmt: skip
THEIR_INPUT = {
    "responses_create_params": {"input": [{"role": "user", "content": "2*3?"}]},
    "expected_answer": "6",
    "_ng_task_index": 0,
    "_ng_rollout_index": 0,
    "agent_ref": {"type": "responses_api_agents", "name": "math"},
}
JUDGE_FAILED = {
    **{name: THEIR_RESULT[name] for name in ("responses_create_params", "response", "agent_ref")},
    "reward": 0.0,
    "_ng_failure_class": "judge_failed",
    "_ng_failure_judge_error": "no answer",
    "_ng_task_index": 0,
    "_ng_rollout_index": 1,
}


@pytest.fixture
def theirs(tmp_path: Path) -> CollectionFiles:
    files = CollectionFiles(tmp_path / "theirs.jsonl")
    write_rows(files.rollouts, [THEIR_RESULT])
    write_rows(files.failures, [JUDGE_FAILED, {**JUDGE_FAILED, "_ng_attempt_index": 1}])
    write_rows(files.materialized_inputs, [THEIR_INPUT, {**THEIR_INPUT, "_ng_rollout_index": 1}])
    return files


def test_a_foreign_row_becomes_a_rollout_with_linear_turns(theirs: CollectionFiles):
    good, failed = read_collection(theirs, policy_version=4).rollouts
    assert (good.rollout_id, good.status, good.reward, good.environment) == ("task-0/0", Status.COMPLETED, 1.0, "math")
    assert good.metrics == {"answer_words": 1}
    assert good.task["expected_answer"] == "6"
    assert [turn.prompt_token_ids for turn in good.turns] == [[1, 2], [4]]
    assert [turn.parent for turn in good.turns] == [None, 0]
    assert good.turns[1] == Turn(1, 0, [4], 4, digest_tokens([1, 2, 3, 4]), [5], [-0.5], 4, "stop", 0.0)
    assert not any("prompt_token_ids" in item for item in good.items)
    assert (failed.status, failed.reward, failed.failure_kind) == (Status.FAILED, None, FailureKind.INFRA)
    assert (failed.failure_code, failed.failure_detail, failed.attempt) == ("judge_failed", "no answer", 2)


def test_an_imported_dataset_gives_back_all_its_files(theirs: CollectionFiles, tmp_path: Path):
    dataset = import_files(str(tmp_path / "store"), "math", theirs.rollouts).reference
    assert dataset.counts["requested"] == 2
    back = export_rollouts(dataset, tmp_path / "back", stem="theirs").files
    for before, after in (
        (theirs.rollouts, back.rollouts),
        (theirs.failures, back.failures),
        (theirs.materialized_inputs, back.materialized_inputs),
    ):
        assert canonical(after) == canonical(before)
    [entry] = json.loads(back.aggregate_metrics.read_bytes())
    assert entry["agent_ref"] == {"name": "math"}
    assert entry["key_metrics"]["mean/output_tokens"] == 2


def test_importing_again_is_a_no_op_and_other_files_are_refused(theirs: CollectionFiles, tmp_path: Path):
    store = str(tmp_path / "store")
    assert import_files(store, "math", theirs.rollouts) == import_files(store, "math", theirs.rollouts)
    theirs.rollouts.write_bytes(line_of({**THEIR_RESULT, "reward": 0.0}))
    with pytest.raises(StoreError, match="imported from other files"):
        import_files(store, "math", theirs.rollouts)


def test_a_rollout_that_stands_twice_is_refused(theirs: CollectionFiles):
    write_rows(theirs.rollouts, [THEIR_RESULT, THEIR_RESULT])
    with pytest.raises(DataError, match="Task 0, rollout 0 stands on lines 1 and 2 of the rollouts file"):
        read_collection(theirs)


def test_tokens_that_cannot_be_read_mask_the_rollout_and_stay_in_it(tmp_path: Path):
    files = CollectionFiles(tmp_path / "theirs.jsonl")
    reply = {"type": "message", "role": "assistant", "content": "6", **call([1], [2]), "generation_log_probs": [None]}
    write_rows(files.rollouts, [{**THEIR_RESULT, "response": {"output": [reply]}}])
    [rollout] = read_collection(files).rollouts
    assert (rollout.status, rollout.failure_code, rollout.turns) == (Status.MASKED, "malformed_token_fields", [])
    assert rollout.reward == 1.0
    assert rollout.items[-1] == reply


def test_two_tasks_of_one_task_id_stay_two_groups(tmp_path: Path):
    files = CollectionFiles(tmp_path / "theirs.jsonl")
    write_rows(files.rollouts, [{**THEIR_RESULT, "task_id": "t", "_ng_task_index": index} for index in (0, 1)])
    assert [rollout.group_id for rollout in read_collection(files).rollouts] == ["t", "t#1"]
