import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.nexrl import FileDataLoader, MockDataLoader
from roundhouse.plugins.nexrl.client import read_items

ROWS = [{"prompt": f"p{index}", "ground_truth": str(index)} for index in range(4)]


def write(directory: Path, ending: str) -> str:
    file = directory / f"data.{ending}"
    match ending:
        case "jsonl":
            file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
        case "csv":
            file.write_text(
                "prompt,ground_truth\n" + "".join(f"{row['prompt']},{row['ground_truth']}\n" for row in ROWS)
            )
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), file)
    return str(file)


def drained(loader: Any) -> list[dict[str, Any]]:
    found = []
    while (item := loader.get_next_item()) is not None:
        found.append(item)
    return found


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_each_format_gives_the_same_items(tmp_path: Path, ending: str) -> None:
    items = drained(FileDataLoader(write(tmp_path, ending)))
    assert items == [row | {"task_id": str(n), "group_id": str(n), "run_id": 0} for n, row in enumerate(ROWS)]


def test_repeats_are_copies_with_a_run_each(tmp_path: Path) -> None:
    items = drained(FileDataLoader(write(tmp_path, "jsonl"), repeat_n=3))
    assert [(item["group_id"], item["run_id"]) for item in items] == [
        (str(n), run) for n in range(4) for run in range(3)
    ]
    items[0]["prompt"] = "changed"
    assert items[1]["prompt"] == "p0"


def test_shuffling_is_a_function_of_the_seed_and_keeps_copies_together(tmp_path: Path) -> None:
    file = write(tmp_path, "jsonl")
    first, same, other = (drained(FileDataLoader(file, shuffle=True, seed=seed, repeat_n=2)) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert all(first[index]["task_id"] == first[index + 1]["task_id"] for index in range(0, 8, 2))


@given(st.lists(st.sampled_from(["next", "front", "back", "reset"]), max_size=30))
def test_a_loader_is_a_queue_that_reset_makes_new(steps: list[str]) -> None:
    loader, model = MockDataLoader(3), [str(n) for n in range(3)]
    for number, step in enumerate(steps):
        item = {"ground_truth": f"x{number}"}
        if step == "next":
            given_out = loader.get_next_item()
            assert (given_out or {}).get("ground_truth") == (model.pop(0) if model else None)
        elif step == "front":
            loader.add_item_front(item)
            model.insert(0, item["ground_truth"])
        elif step == "back":
            loader.add_item(item)
            model.append(item["ground_truth"])
        else:
            loader.reset()
            model = [str(n) for n in range(3)]
        assert [loader[index]["ground_truth"] for index in range(len(loader))] == model
        assert loader.is_finished() == (not model) == (not loader.can_return_item())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "x", "ends in .jsonl, .csv, .parquet"),
        ("a.jsonl", "", "holds no rows"),
        ("a.jsonl", "1", "not objects"),
        ("a.parquet", "x", "cannot be read"),
        ("a.jsonl", '{"task_id": 1}\n{"task_id": "1"}', "already used on row 1"),
    ],
)
def test_a_file_that_is_no_data_is_refused_by_its_key(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"environment.train_data") as caught:
        read_items(str(file), "environment.train_data")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"a": 1}\n{', "line 2 is not JSON"),
        ("a.csv", f"a,b\n1,2\n{'x' * 200_000},3\n", "line 3 cannot be read: field larger than field limit"),
        ("a.csv", "a,b\n1,2\n3,4,5\n", "line 3 has 1 cells too many"),
        (
            "a.csv",
            'a,b\n1,2\n"3,4\n5,6\n',
            "line 4 cannot be read: unexpected end of data",
        ),  # all that follows was one cell
        ("a.csv", "a,b,a\n1,2,3\n", "the column 'a' is given twice"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(DataError, match=r"environment.train_data") as caught:
        read_items(str(file), "environment.train_data")
    assert said in str(caught.value)


def test_a_moment_that_python_cannot_hold_is_refused_by_its_key(tmp_path: Path) -> None:
    pq.write_table(pa.table({"at": pa.array([2**62], pa.timestamp("us"))}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"environment.train_data .* cannot be read: date value out of range"):
        read_items(str(tmp_path / "a.parquet"), "environment.train_data")


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_items("/nowhere/items.jsonl", "environment.train_data")
