from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nemo_gym.exchange.json_lines import Row, write_rows
from roundhouse.plugins.nemo_gym.exchange.task_rows import (
    Materialization,
    PromptTemplate,
    Repeats,
    materialize,
    read_prompt,
)

AGENT = "math"


def row(text: str, **fields: Any) -> Row:
    return {"responses_create_params": {"input": text}, **fields}


def materialized(tmp_path: Path, rows: list[Row], **how: Any) -> list[Row]:
    write_rows(tmp_path / "tasks.jsonl", rows)
    return materialize(str(tmp_path / "tasks.jsonl"), Materialization(**{"agent": AGENT, **how}))


def keys(rows: list[Row]) -> list[tuple[str, int, int]]:
    inputs = [one["responses_create_params"]["input"] for one in rows]
    return [(text, one["_ng_task_index"], one["_ng_rollout_index"]) for text, one in zip(inputs, rows, strict=True)]


def test_an_index_that_is_no_whole_number_is_a_fault_of_its_line(tmp_path):
    rows = [{"responses_create_params": {"input": "x"}, "_ng_task_index": index} for index in (0, "1", None, 2.5)]
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    with pytest.raises(DataError, match=r"(?s)3 line\(s\).*line 2 has _ng_task_index '1'") as error:
        materialize(str(path), Materialization(agent="a"))
    assert "line 4 has _ng_task_index 2.5" in str(error.value)


def test_unknown_agents_and_metadata_that_is_no_text_are_faults_of_their_lines(tmp_path: Path):
    """They were rows that failed, the second after a whole rollout."""
    poison = [row("a", agent_ref={"name": "matth"}), row("b"), row("c", agent_ref={"name": "x"})]
    poison.append({"responses_create_params": {"input": "d", "metadata": {"n": 3}}})
    with pytest.raises(DataError, match=r"(?s)3 line\(s\)") as error:
        materialized(tmp_path, poison, agents=frozenset({"math", "code"}))
    for part in ("'matth'. Did you mean math?", "'x'. Available: code, math.", "line 4: the values of"):
        assert part in str(error.value)
    assert len(materialized(tmp_path, poison[:3])) == 3, "without a head server any agent may be there"


def test_rows_are_repeated_beside_themselves(tmp_path: Path):
    found = materialized(tmp_path, [row("a"), row("b")], repeats=Repeats.of(2))
    assert keys(found) == [("a", 0, 0), ("a", 0, 1), ("b", 1, 0), ("b", 1, 1)]


def test_lines_of_the_same_text_are_one_task(tmp_path: Path):
    assert keys(materialized(tmp_path, [row("a"), row("b"), row("a")])) == [("a", 0, 0), ("b", 1, 0), ("a", 0, 1)]


def test_an_index_that_a_row_brings_along_is_kept(tmp_path: Path):
    found = materialized(tmp_path, [row("a", _ng_task_index=7), row("b", _ng_task_index=7)])
    assert keys(found) == [("a", 7, 0), ("b", 7, 1)]


def test_repeats_may_differ_by_agent(tmp_path: Path):
    rows = [row("a"), row("b", agent_ref={"name": "code"})]
    found = materialized(tmp_path, rows, repeats=Repeats.of({"code": 2, "_default": 1}))
    assert keys(found) == [("a", 0, 0), ("b", 1, 0), ("b", 1, 1)]
    assert [one["agent_ref"]["name"] for one in found] == [AGENT, "code", "code"]
    with pytest.raises(DataError, match="names neither the agent 'math' nor _default; it has code"):
        materialized(tmp_path, rows, repeats=Repeats.of({"code": 2}))


@pytest.mark.parametrize("value", [0, -1, True, "two", {}, {"a": 0}])
def test_numbers_of_repeats_that_are_none_are_refused(value: Any):
    with pytest.raises(ConfigError, match="num_repeats is"):
        Repeats.of(value)


def test_the_seed_of_a_repetition_stands_in_extra_body_beside_what_is_there(tmp_path: Path):
    params = {"input": "a", "metadata": {"extra_body": '{"top_k":5}', "note": "x"}}
    found = materialized(tmp_path, [{"responses_create_params": params}], repeats=Repeats.of(2), add_seed=True)
    metadata = [one["responses_create_params"]["metadata"] for one in found]
    assert [orjson.loads(one["extra_body"]) for one in metadata] == [{"top_k": 5, "seed": 0}, {"top_k": 5, "seed": 1}]
    assert metadata[0]["note"] == "x"


def test_parameters_are_replaced_and_the_number_of_rows_is_limited(tmp_path: Path):
    found = materialized(tmp_path, [row("a"), row("b")], limit=1, params={"temperature": 0.5})
    assert [one["responses_create_params"] for one in found] == [{"input": "a", "temperature": 0.5}]


def test_all_lines_at_fault_are_told_together(tmp_path: Path):
    rows = [row("a"), {"question": "no parameters"}, {"responses_create_params": {"input": "a", "top_k": 5}}]
    with pytest.raises(DataError) as error:
        materialized(tmp_path, rows)
    assert "2 line(s) of" in str(error.value)
    assert "line 2: a task row needs responses_create_params.input" in str(error.value)
    assert "line 3: responses_create_params: body.top_k: Extra inputs are not permitted" in str(error.value)


def test_a_row_without_an_agent_is_refused_if_none_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="line 1 names no agent"):
        materialized(tmp_path, [row("a")], agent=None)


def test_a_file_without_rows_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="holds no task rows"):
        materialized(tmp_path, [])


def test_a_prompt_makes_the_input_and_leaves_the_other_parameters(tmp_path: Path):
    prompt = PromptTemplate(user="{question} {{exactly}} {options[0]}", system="Be brief.")
    rows = [{"question": "2*3?", "options": ["6"], "responses_create_params": {"temperature": 0}}]
    [found] = materialized(tmp_path, rows, prompt=prompt)
    assert found["responses_create_params"] == {
        "temperature": 0,
        "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2*3? {exactly} 6"}],
    }


def test_a_prompt_refuses_rows_that_have_an_input_or_lack_a_field(tmp_path: Path):
    with pytest.raises(DataError, match=r"line 1 has responses_create_params\.input already"):
        materialized(tmp_path, [row("a")], prompt=PromptTemplate(user="{question}"))
    with pytest.raises(DataError, match="line 1: the prompt names the field 'question'; the row has answer"):
        materialized(tmp_path, [{"answer": 1}], prompt=PromptTemplate(user="{question}"))


def test_a_prompt_configuration_is_read_from_yaml(tmp_path: Path):
    (tmp_path / "prompt.yaml").write_text("user: '{question}'\n")
    assert read_prompt(str(tmp_path / "prompt.yaml")) == PromptTemplate(user="{question}")
    (tmp_path / "prompt.yaml").write_text("system: Be brief.\n")
    with pytest.raises(ConfigError, match="needs `user`"):
        read_prompt(str(tmp_path / "prompt.yaml"))
