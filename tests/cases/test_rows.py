"""Files of rows that failed once, as other programs wrote them: each is read whole, or refused with its line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from roundhouse.environments.task_files import read_task_rows
from roundhouse.errors import DataError
from roundhouse.stages.chat_rows import read_chat_rows

CASES = Path(__file__).parent


def test_b001_rows_with_a_byte_order_mark_and_odd_line_ends_are_whole() -> None:
    rows = read_task_rows(str(CASES / "B001.jsonl"), "environment.train_tasks")
    assert [(row["task_id"], row["answer"]) for row in rows] == [("t1", "2"), ("t2", "4"), ("t3", "6"), ("t4", "8")]
    assert set(rows[3]["note"]) > {"\u2028", "\x85"}
    conversations = read_chat_rows(str(CASES / "B001_chat.jsonl"))
    assert [row["messages"][1]["content"] for row in conversations] == ["2", "4", "6"]


def test_b002_a_null_of_arrow_is_a_missing_value() -> None:
    first, second, *_ = read_chat_rows(str(CASES / "B002.jsonl"))
    assert [first["reward"], second["reward"]] == [1.0, 0.5]
    call = first["messages"][1]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert "null" not in json.dumps(second["tools"])


def test_b003_tools_as_a_text_are_tools_and_an_empty_schema_stays() -> None:
    [row] = read_chat_rows(str(CASES / "B003.jsonl"))
    [tool] = row["tools"]
    assert tool["function"]["name"] == "look"
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}


def test_b005_attempts_without_an_index_are_one_group_or_named_beside_others(tmp_path: Path) -> None:
    files_of = pytest.importorskip("roundhouse.plugins.nemo_gym.exchange.json_lines").CollectionFiles
    read_collection = pytest.importorskip("roundhouse.plugins.nemo_gym.exchange.reading").read_collection
    shutil.copy(CASES / "B005.jsonl", tmp_path / "mixed.jsonl")
    with pytest.raises(DataError, match=r"line 1 has no _ng_rollout_index .*line 5 has one"):
        read_collection(files_of(tmp_path / "mixed.jsonl"))
    files = files_of(tmp_path / "null.jsonl")
    files.rollouts.write_text("".join((CASES / "B005.jsonl").read_text().splitlines(keepends=True)[:4]))
    assert [rollout.group_id for rollout in read_collection(files).rollouts] == ["a"] * 4
