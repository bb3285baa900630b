"""Files of tasks and of rollouts, as other programs write them: ids, numbers, nulls, encodings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.yaml_text import read_yaml
from roundhouse.environments.null_fields import arguments_without_nulls, schema_without_nulls
from roundhouse.environments.task_files import read_task_rows
from roundhouse.errors import ConfigError, DataError, RoundhouseError
from roundhouse.policy.model_directory import template_text
from roundhouse.stages.chat_rows import read_chat_rows

Reader = Callable[[str], list[dict[str, Any]]]


def read_items(uri: str) -> list[dict[str, Any]]:
    return pytest.importorskip("roundhouse.plugins.nexrl.client").read_items(uri, "environment.train_data")


def read_rollouts(uri: str) -> list[dict[str, Any]]:
    return pytest.importorskip("roundhouse.plugins.nemo_gym.exchange.json_lines").read_rows(uri)


READERS: dict[str, Reader] = {
    "task rows": lambda uri: read_task_rows(uri, "environment.train_tasks"),
    "items": read_items,
}


def line(**fields: Any) -> str:
    return json.dumps({"responses_create_params": {"input": "What is 1+1?"}, **fields})


def written(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("task_id", ["", "  ", True, [1], {"a": 1}])
def test_an_id_that_names_nothing_is_refused_with_file_and_line(tmp_path: Path, reader: str, task_id: Any) -> None:
    file = written(tmp_path, line(task_id="a"), line(task_id=task_id))
    with pytest.raises(ConfigError, match=r"tasks.jsonl.*(line|row) 2: task_id is "):
        READERS[reader](file)


@pytest.mark.parametrize(("reader", "generated"), [("task rows", ["line-2", "line-2#"]), ("items", ["1", "1#"])])
def test_a_generated_id_is_no_id_of_a_user(tmp_path: Path, reader: str, generated: list[str]) -> None:
    plain = READERS[reader](written(tmp_path, line(task_id="a"), line()))
    taken = READERS[reader](written(tmp_path, line(task_id=generated[0]), line()))
    assert [plain[1]["task_id"], taken[1]["task_id"]] == generated
    assert len({row["task_id"] for row in taken}) == 2


def chat(answer: str = "2", **fields: Any) -> str:
    messages = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages, **fields}, ensure_ascii=False)


ALL_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    **{name: (line(answer="Zürich").replace("\\u00fc", "ü"), reader) for name, reader in READERS.items()},
    "rollouts": ('{"a": "Zürich"}', read_rollouts),
    "chat rows": (chat("Zürich"), read_chat_rows),
}
TEXT_READERS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "csv": ("a.csv", "prompt,answer\nWo?,Zürich\n", read_items),
    "yaml": ("a.yaml", "run_id: r\nsystem: Zürich\n", lambda uri: read_yaml(Path(uri))),
    "template": ("a.jinja", "{{ messages }}\nZürich", template_text),
}


@pytest.mark.parametrize("reader", ALL_READERS)
def test_rows_of_windows_tools_are_read_as_those_of_others(tmp_path: Path, reader: str) -> None:
    row, read = ALL_READERS[reader]
    separated = row.replace("Zürich", "Zü\u2028rich")
    file = tmp_path / "rows.jsonl"
    file.write_bytes(f"{row}\n{separated}\n{row}\n".encode())
    plain = json.dumps(read(str(file)))
    file.write_bytes(f"\ufeff{row}\r\n{separated}\r\n{row}".encode())
    assert json.dumps(read(str(file))) == plain
    assert "\\u2028" in plain


@pytest.mark.parametrize("reader", ALL_READERS)
@pytest.mark.parametrize(
    ("encoding", "words"),
    [("latin-1", r"2(: the line)? is not UTF-8 text: byte 0xfc at offset \d+"), ("utf-16", "is UTF-16 text")],
)
def test_rows_in_another_encoding_are_refused_with_their_place(
    tmp_path: Path, reader: str, encoding: str, words: str
) -> None:
    row, read = ALL_READERS[reader]
    file = tmp_path / "rows.jsonl"
    file.write_bytes("\n".join([row.replace("ü", "u"), row]).encode(encoding))
    with pytest.raises(RoundhouseError, match=rf"rows\.jsonl.*{words}.*Save it as UTF-8"):
        read(str(file))


@pytest.mark.parametrize("reader", TEXT_READERS)
def test_a_text_file_has_a_mark_or_is_refused_with_its_byte(tmp_path: Path, reader: str) -> None:
    name, text, read = TEXT_READERS[reader]
    file = tmp_path / name
    file.write_bytes(text.encode())
    plain = read(str(file))
    file.write_bytes(f"\ufeff{text}".encode())
    assert read(str(file)) == plain
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(RoundhouseError, match=rf"{name}.* is not UTF-8 text: byte 0xfc at offset \d+ \(line 2\)"):
        read(str(file))
    file.write_bytes(text.encode("utf-16"))
    with pytest.raises(RoundhouseError, match="is UTF-16 text"):
        read(str(file))


@pytest.mark.parametrize("reader", ALL_READERS)
@pytest.mark.parametrize("digits", [str(2**64), str(-(2**63) - 1), "9" * 40], ids=["2^64", "-2^63 - 1", "long"])
def test_an_integer_beyond_64_bits_is_refused_with_its_line(tmp_path: Path, reader: str, digits: str) -> None:
    row, read = ALL_READERS[reader]
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{row}\n{row[:-1]}, "number": {digits}}}\n')
    with pytest.raises(RoundhouseError, match=r"rows\.jsonl.*2.*: the integer -?\d+ has more than 64 bits"):
        read(str(file))


def test_integers_of_64_bits_and_long_digits_in_texts_are_exact(tmp_path: Path) -> None:
    values = [2**64 - 1, -(2**63), "123456789012345678901234567890", 0.12345678901234567890123]
    rows = read_task_rows(written(tmp_path, line(answers=values)), "environment.train_tasks")
    assert rows[0]["answers"] == values


NULLS = {"type": "object", "required": None, "properties": {"city": {"type": "string", "enum": None}, "symbol": None}}


def test_a_schema_loses_only_the_nulls_that_mean_nothing() -> None:
    assert schema_without_nulls(NULLS) == {"type": "object", "properties": {"city": {"type": "string"}}}
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert schema_without_nulls({"properties": {"a": optional}}) == {"properties": {"a": optional}}


def test_arguments_lose_the_nulls_that_their_schema_does_not_accept() -> None:
    schema = {
        "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "string"}, "c": {"properties": {"d": {}}}}
    }
    arguments = {"a": None, "b": None, "c": {"d": None, "e": None}, "f": None}
    assert arguments_without_nulls(arguments, schema) == {"a": None, "c": {"d": None}}
    assert arguments_without_nulls({"a": None, "b": 1}, None) == {"b": 1}


def test_chat_rows_that_arrow_wrote_are_the_rows_before(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": NULLS}}
    call = {
        "id": None,
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Oslo", "symbol": None}},
    }
    blank = {"tool_calls": None, "tool_call_id": None, "name": None}
    messages = [
        {**blank, "role": "user", "content": "Rain?"},
        {**blank, "role": "assistant", "content": None, "tool_calls": [call]},
        {**blank, "role": "tool", "content": "yes"},
        {**blank, "role": "assistant", "content": "Yes.", "weight": None},
    ]
    [row] = read_chat_rows(written(tmp_path, json.dumps({"messages": messages, "tools": [tool], "reward": None})))
    assert row["reward"] == 1.0
    assert row["messages"][0] == {"role": "user", "content": "Rain?"}
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert row["messages"][2]["tool_call_id"] == "call_0"
    assert row["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {"city": {"type": "string"}}}


def test_tools_as_a_json_text_are_the_tools(tmp_path: Path) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    chat_tools = [{"type": "function", "function": function}]
    [row] = read_chat_rows(written(tmp_path, chat(tools=json.dumps(chat_tools))))
    assert row["tools"] == chat_tools
    params = {"input": "x", "tools": json.dumps([{"type": "function", **function}])}
    [task] = read_task_rows(written(tmp_path, json.dumps({"responses_create_params": params})), "key")
    assert task["responses_create_params"]["tools"] == [{"type": "function", **function}]
    with pytest.raises(DataError, match=r"row 1: tools are a text that is not JSON"):
        read_chat_rows(written(tmp_path, chat(tools="look(")))
