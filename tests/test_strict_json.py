"""A key that is given twice is refused, at any depth; other JSON is read as it is."""

from __future__ import annotations

import pytest

from roundhouse.environments.task_files import parsed_row
from roundhouse.errors import DataError
from roundhouse.strict_json import DuplicateKey, read_json

TWICE = ['{"reward": 0.0, "reward": 1.0}', '[{"a": {"b": 1, "c": [], "b": 2}}]', '{"a": 1, "\\u0061": 2}']


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(DuplicateKey, match="given twice"):
        read_json(text.encode())


@pytest.mark.parametrize("text", ['{"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}]}', "[1.5, null, true]", '"a"'])
def test_other_json_is_read(text: str) -> None:
    assert read_json(text) == read_json(text.encode())


def test_json_beyond_the_depth_limit_is_an_error_of_its_own() -> None:
    for depth in (900, 1010, 100_000):
        try:
            read_json("[" * depth + "]" * depth)
        except ValueError:
            continue


def test_a_row_with_a_key_twice_is_named_with_its_line() -> None:
    row = b'{"responses_create_params": {"input": "a"}, "answer": 1, "answer": 2}'
    with pytest.raises(DataError, match=r"line 7: .*'answer' is given twice"):
        parsed_row(row, "line 7")
