from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nemo_gym.config.instances import DatasetEntry
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots
from roundhouse.plugins.nemo_gym.exchange.json_lines import Row, read_rows, write_rows
from roundhouse.plugins.nemo_gym.exchange.task_rows import AgentDataset, collate


def row(text: str, **fields: Any) -> Row:
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, **fields}


def dataset(agent: str, kind: str, path: str, **fields: Any) -> AgentDataset:
    entry = {"name": path, "type": kind, "jsonl_fpath": path, "license": "MIT", **fields}
    return AgentDataset(agent, TypeAdapter(DatasetEntry).validate_python(entry))


@pytest.fixture
def roots(tmp_path: Path) -> SearchRoots:
    write_rows(tmp_path / "easy.jsonl", [row("one two", level=1, kind="sum"), row("three", level=2, kind="sum")])
    write_rows(tmp_path / "hard.jsonl", [row("four", level=9, kind="product")])
    return SearchRoots((tmp_path,))


def test_datasets_of_a_type_become_one_file_with_their_agents(roots: SearchRoots, tmp_path: Path):
    datasets = [
        dataset("math", "train", "easy.jsonl", num_repeats=2),
        dataset("hard math", "train", "hard.jsonl"),
        dataset("math", "validation", "hard.jsonl"),
        dataset("math", "example", "easy.jsonl"),
    ]
    files = collate(datasets, tmp_path / "out", roots, mode="train_preparation")
    assert [(file.path.name, file.rows) for file in files] == [("train.jsonl", 5), ("validation.jsonl", 1)]
    rows = read_rows(tmp_path / "out/train.jsonl")
    assert [one["level"] for one in rows] == [1, 1, 2, 2, 9]
    assert rows[4]["agent_ref"] == {"type": "responses_api_agents", "name": "hard math"}


def test_metrics_count_rows_as_they_are_written(roots: SearchRoots, tmp_path: Path):
    collate([dataset("math", "train", "easy.jsonl", num_repeats=2)], tmp_path / "out", roots, mode="train_preparation")
    metrics = json.loads((tmp_path / "out/train_metrics.json").read_text())
    assert (metrics["name"], metrics["num_repeats"], metrics["Number of examples"]) == ("easy.jsonl", 2, 4)
    assert metrics["level"] == {
        "Total # non-null values": 4,
        "Average": 1.5,  # (1 + 1 + 2 + 2) / 4
        "Min": 1.0,
        "Max": 2.0,
        "Standard deviation": 0.577,  # sqrt(4 * 0.25 / 3)
    }
    assert metrics["kind"] == {"unique_count": 1, "total_count": 4}
    assert metrics["Number of tools"]["Total # non-null values"] == 0
    assert metrics["Number of turns"]["Average"] == 1.0


def test_metrics_that_changed_are_not_replaced_unless_asked(roots: SearchRoots, tmp_path: Path):
    datasets = [dataset("math", "train", "easy.jsonl")]
    collate(datasets, tmp_path / "out", roots, mode="train_preparation")
    before = (tmp_path / "out/train_metrics.json").read_text()
    write_rows(tmp_path / "easy.jsonl", [row("one", level=5, kind="sum")])
    with pytest.raises(DataError, match=r"train_metrics\.json has other numbers than the data"):
        collate(datasets, tmp_path / "out", roots, mode="train_preparation")
    assert (tmp_path / "out/train_metrics.json").read_text() == before
    assert (tmp_path / "out/train_metrics_conflict.json").exists()
    collate(datasets, tmp_path / "out", roots, mode="train_preparation", overwrite=True)
    assert json.loads((tmp_path / "out/train_metrics.json").read_text())["Number of examples"] == 1


def test_a_benchmarks_prompt_makes_its_inputs(roots: SearchRoots, tmp_path: Path):
    write_rows(tmp_path / "bench.jsonl", [{"question": "2*3?"}])
    (tmp_path / "prompt.yaml").write_text("user: '{question}'\n")
    bench = dataset("math", "benchmark", "bench.jsonl", prepare_script="prepare.py", prompt_config="prompt.yaml")
    collate([bench], tmp_path / "out", roots, mode="train_preparation")
    [found] = read_rows(tmp_path / "out/benchmark.jsonl")
    assert found["responses_create_params"]["input"] == [{"role": "user", "content": "2*3?"}]


def test_a_dataset_that_is_nowhere_is_told_with_the_places(roots: SearchRoots, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"of math is not there: gone\.jsonl lies under none of"):
        collate([dataset("math", "train", "gone.jsonl")], tmp_path / "out", roots, mode="train_preparation")


def test_a_bad_line_leaves_no_file(roots: SearchRoots, tmp_path: Path):
    (tmp_path / "easy.jsonl").write_text('{"responses_create_params": {"input": 5}}\n')
    with pytest.raises(DataError, match=r"easy\.jsonl, line 1"):
        collate([dataset("math", "train", "easy.jsonl")], tmp_path / "out", roots, mode="train_preparation")
    assert not (tmp_path / "out/train.jsonl").exists()
