"""TRL's completions: rewards that its advantages prove, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from roundhouse.errors import ConfigError, DataError
from roundhouse.plugins.trl.reader import TrlReader, read
from roundhouse.stages.importing import find_format, import_files
from roundhouse.trajectories.records import Status

PLAIN = TrlReader(kind="trl")
PROMPT, REPLY = [{"role": "user", "content": "2*3?"}], [{"role": "assistant", "content": "6"}]


def written(directory: Path, **columns: Any) -> Path:
    file = directory / "completions_00010.parquet"
    table = {"step": [10] * 2, "prompt": [PROMPT] * 2, "completion": [REPLY] * 2} | columns
    pd.DataFrame(table).to_parquet(file)
    return file


def test_rewards_are_the_columns_that_explain_the_advantages(tmp_path: Path) -> None:
    file = written(
        tmp_path, correct=[1.0, 0.0], short=[0.5, None], answer=["6", "6"], took=[3, 4], advantage=[0.7071, -0.7071]
    )
    assert find_format(tmp_path) == ("trl", [file])
    one, other = read([file], PLAIN, 0).rollouts
    assert (one.reward, one.reward_components) == (1.5, {"correct": 1.0, "short": 0.5})
    assert (other.reward, other.reward_components) == (0.0, {"correct": 0.0})
    assert (one.group_id, one.sample, other.sample) == (other.group_id, 0, 1)
    assert one.task["answer"] == "6"
    assert "took" not in one.task, "it differs within the group"
    assert [item["role"] for item in one.items] == ["user", "assistant"]
    assert not one.turns


def test_weights_that_the_file_does_not_have_are_named(tmp_path: Path) -> None:
    file = written(tmp_path, correct=[1.0, 0.0], short=[0.0, 1.0], advantage=[0.7071, -0.7071])
    with pytest.raises(
        DataError, match=r"rows 1 to 2: the advantages do not follow .* correct, short.* rewards.correct=1"
    ):
        read([file], PLAIN, 0)
    [one, other] = read([file], TrlReader(kind="trl", rewards={"correct": 2, "short": 0.5}), 0).rollouts
    assert (one.reward, other.reward) == (2.0, 0.5)
    assert one.metrics == {"correct": 1.0, "short": 0.0}
    with pytest.raises(DataError, match="no column 'right', which rewards names"):
        read([file], TrlReader(kind="trl", rewards={"right": 1}), 0)
    with pytest.raises(ConfigError, match="weights"):
        import_files(str(tmp_path / "store"), "t", file, options={"weights": 1})


def test_a_row_that_no_function_judged_is_a_failure(tmp_path: Path) -> None:
    file = written(
        tmp_path, correct=[float("nan"), 1.0], prompt=["2*3?"] * 2, completion=["", "6"], advantage=[0.0, 0.0]
    )
    unjudged, judged = read([file], PLAIN, 0).rollouts
    assert (unjudged.status, unjudged.failure_code) == (Status.FAILED, "no_reward")
    assert (judged.reward, judged.items[0]["content"]) == (1.0, "2*3?")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"correct": [float("inf"), 0.0]}, "row 1: correct is inf, not a finite number"),
        ({"prompt": [1, 1]}, "row 1: prompt is 1, not a text or a list of messages"),
        ({"prompt": [[{"role": "robot", "content": "x"}]] * 2}, "row 1: prompt.0: role: .* 'robot'"),
        (
            {"completion": [[{"role": "tool", "content": "x"}]] * 2},
            "completion.0: the output of a tool follows no call",
        ),
        ({"advantage": [float("inf"), 0.0]}, "rows 1 to 2: the advantages do not follow"),
    ],
)
def test_a_bad_row_is_refused_with_its_column(columns: dict[str, Any], problem: str, tmp_path: Path) -> None:
    table = {"correct": [1.0, 0.0], "advantage": [0.5, -0.5]} | columns
    with pytest.raises(DataError, match=problem):
        read([written(tmp_path, **table)], PLAIN, 0)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, correct=[1.0, 0.0], advantage=[0.5, -0.5])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"completions_00010\.parquet cannot be read as Parquet"):
        read([file], PLAIN, 0)
