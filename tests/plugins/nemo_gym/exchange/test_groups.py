"""Rollouts of one task are one group, whether or not their rows have an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundhouse.errors import DataError
from roundhouse.plugins.nemo_gym.exchange.json_lines import CollectionFiles, read_rows
from roundhouse.plugins.nemo_gym.exchange.reading import read_collection, write_collection


def rollout_row(**fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": "x", "annotations": []}
    message = {"type": "message", "role": "assistant", "content": [part]}
    return {
        "agent_ref": {"name": "math"},
        "responses_create_params": {"input": [{"role": "user", "content": "?"}]},
        "reward": 0.0,
        "response": {"id": "r", "status": "completed", "output": [message]},
        **fields,
    }


def collection(tmp_path: Path, *rows: dict[str, Any]) -> CollectionFiles:
    files = CollectionFiles(tmp_path / "run.jsonl")
    files.rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


@pytest.mark.parametrize("indexes", [{"_ng_task_index": 0, "_ng_rollout_index": None}, {"_ng_task_index": 0}, {}])
def test_rollouts_of_one_task_without_an_index_are_one_group(tmp_path: Path, indexes: dict[str, Any]) -> None:
    rows = [rollout_row(task_id="a", **indexes) for _ in range(4)]
    collected = read_collection(collection(tmp_path, *rows))
    assert [rollout.rollout_id for rollout in collected.rollouts] == ["a/0", "a/1", "a/2", "a/3"]
    exported = CollectionFiles(tmp_path / "back.jsonl")
    write_collection(collected.rollouts, collected.originals, exported)
    assert read_rows(exported.rollouts) == rows


def test_a_file_in_which_some_rollouts_have_an_index_is_refused_with_both_lines(tmp_path: Path) -> None:
    rows = [rollout_row(task_id="a", _ng_task_index=0, _ng_rollout_index=index) for index in (0, None)]
    with pytest.raises(DataError, match=r"run.jsonl, line 2 has no _ng_rollout_index .*run.jsonl, line 1 has one"):
        read_collection(collection(tmp_path, *rows))


def test_groups_of_imported_tasks_take_no_name_of_another_task(tmp_path: Path) -> None:
    ids = ["a", "a#1", "a", "a#1"]
    rows = [rollout_row(task_id=each, _ng_task_index=k, _ng_rollout_index=0) for k, each in enumerate(ids)]
    groups = [rollout.group_id for rollout in read_collection(collection(tmp_path, *rows)).rollouts]
    assert groups == ["a", "a#1", "a#2", "a#1#3"]
