from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.errors import DataError
from roundhouse.plugins.nemo_gym.exchange.json_lines import Appender, iter_rows, line_of, read_rows, write_rows


def test_a_torn_last_line_is_cut_off_before_the_next_is_appended(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a')
    with Appender(path) as rows:
        rows.append({"a": 3})
    assert read_rows(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}')
    with Appender(path) as rows:
        rows.append({"a": 3})
    assert read_rows(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_file_of_one_torn_line_that_is_longer_than_a_block_becomes_empty(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text":"' + b"x" * 200_000)
    Appender(path).__exit__()
    assert path.read_bytes() == b""


def test_a_row_is_on_disk_when_append_returns(tmp_path: Path):
    with Appender(tmp_path / "rows.jsonl") as rows:
        rows.append({"a": 1})
        assert (tmp_path / "rows.jsonl").read_bytes() == b'{"a":1}\n'


def test_the_line_at_fault_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n\n[2]\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 3 is a list; each line must be a JSON object"):
        read_rows(path)
    path.write_bytes(b'{"a":1}\n{"a"\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 2 is not JSON"):
        read_rows(path)


def test_a_torn_tail_can_be_left_out_while_another_broken_line_cannot(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n{"a')
    assert list(iter_rows(path, torn_tail=True)) == [(1, {"a": 1})]
    path.write_bytes(b'{"a\n{"a":1}\n')
    with pytest.raises(DataError, match="line 1"):
        read_rows(path, torn_tail=True)


def test_what_json_cannot_hold_is_refused_and_leaves_no_half_file(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be written as JSON"):
        line_of({"a": 2**64})
    write_rows(tmp_path / "rows.jsonl", [{"a": 1}])
    with pytest.raises(DataError):
        write_rows(tmp_path / "rows.jsonl", [{"a": 2}, {"a": 2**64}])
    assert read_rows(tmp_path / "rows.jsonl") == [{"a": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_files_are_read_through_fsspec():
    import fsspec

    with fsspec.open("memory://exchange/rows.jsonl", "wb") as file:
        file.write(b'{"a":1}\n')
    assert read_rows("memory://exchange/rows.jsonl") == [{"a": 1}]


def test_a_torn_line_with_a_key_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"responses_create_params": {"input": "a"}, "answer": 1, "answer": 2}')
    with pytest.raises(DataError, match=r"line 1: .*given twice"):
        list(iter_rows(tmp_path / "rows.jsonl", torn_tail=True))
