"""Rollouts of other systems in a store: their import, verdicts on them, and training on them with a small policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.errors import ConfigError, DataError, StoreError
from roundhouse.sql.database import run_query
from roundhouse.stages.fork import offline_config
from roundhouse.stages.importing import import_files
from roundhouse.stages.offline import find_datasets
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest, read_table
from tests.stages.offline_world import make_config, train_to_the_end

pytestmark = pytest.mark.usefixtures("no_resident_trainer")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with its starting policy alone."""
    run = open_run(make_config(tmp_path_factory.mktemp("imported"), validation={}))
    starting_policy(run)
    return run


def completions(directory: Path, count: int = 8, text: str = "The answer is 6.") -> Path:
    """Write TRL's file of `count` groups of two rows, the first of each with the higher reward."""
    directory.mkdir()
    rows = []
    for number in range(count):
        prompt = [{"role": "user", "content": f"What is {number}*2?"}]
        for reward, reply in ((1.0, text), (0.0, "I pass.")):
            completion = [{"role": "assistant", "content": reply}]
            rows.append(
                {"step": 1, "prompt": prompt, "completion": completion, "right": reward, "advantage": reward - 0.5}
            )
    pd.DataFrame(rows).to_parquet(directory / "completions_00001.parquet")
    return directory


def trajectories(file: Path, **extra: Any) -> Path:
    """Write ATIF without tokens: one trajectory, without a reward unless `extra` has one."""
    steps = [
        {"step_id": 1, "source": "user", "message": "What is 2*3?"},
        {"step_id": 2, "source": "agent", "message": "6"},
    ]
    tree = {"schema_version": "ATIF-v1.7", "agent": {"name": "a", "version": "1"}, "steps": steps}
    file.write_text(json.dumps(tree | {"final_metrics": {"extra": extra}}, indent=1))
    return file


def test_the_same_import_is_a_no_op_and_another_is_refused(tmp_path: Path) -> None:
    store, file = str(tmp_path / "store"), trajectories(tmp_path / "a.json")
    first = import_files(store, "theirs", file)
    assert (first.format, first.with_tokens) == ("atif", 0)
    assert import_files(store, "theirs", file).reference == first.reference
    trajectories(file, reward=1)
    with pytest.raises(StoreError, match=r"imported from other files or with other options.*--version"):
        import_files(store, "theirs", file)
    assert import_files(store, "theirs", file, "v2").reference.counts["completed"] == 1


def test_a_file_of_no_format_and_options_that_a_format_lacks_are_refused(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    for name, text in (("a.txt", "hello"), ("b.jsonl", '{"a": 1}\n'), ("empty.json", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=r"of no format that a reader recognises: .*atif.*trl.*--format"):
            import_files(store, "theirs", tmp_path / name)
    with pytest.raises(ConfigError, match="does not exist"):
        import_files(store, "theirs", tmp_path / "missing")
    file = trajectories(tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"--format is 'word'. Formats: atif, nemo_gym, trl, verifiers"):
        import_files(store, "theirs", file, file_format="word")
    with pytest.raises(ConfigError, match=r"--set rewards: the reader atif has no options"):
        import_files(store, "theirs", file, options={"rewards": {}})
    with pytest.raises(DataError, match=r"a\.json cannot be read as Parquet"):
        import_files(store, "theirs", file, file_format="trl")
    assert not Path(store).exists(), "nothing is stored"


def test_the_command_prints_the_rollouts_and_queries_find_them(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    command = ["import", str(completions(tmp_path / "c")), "--name", "trl", "--store", store]
    shown = CliRunner().invoke(app, command)
    assert "trl: 16 requested, 16 completed; 0 with token IDs" in shown.output
    exported = CliRunner().invoke(
        app, ["export", "trl/v000001", "--format", "atif", "--output", str(tmp_path / "out"), "--store", store]
    )
    assert "16 rollouts, 0 failures" in exported.output
    back = import_files(store, "back", tmp_path / "out").reference
    [reference] = find_datasets(store, ["trl"])
    assert read_table(back, "rollouts") == read_table(reference, "rollouts")
    table = run_query(
        store, "SELECT dataset, avg(reward) AS reward FROM dataset_rollouts GROUP BY dataset ORDER BY dataset"
    )
    assert table.to_pylist() == [{"dataset": "back", "reward": 0.5}, {"dataset": "trl", "reward": 0.5}]


def test_verdicts_replace_rewards_and_fill_missing_ones(tmp_path: Path) -> None:
    rescore = pytest.importorskip("roundhouse.plugins.lab.replays").rescore
    store = str(tmp_path / "store")
    import_files(store, "trl", completions(tmp_path / "c"))
    import_files(store, "atif", trajectories(tmp_path / "a.json"))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2"}\n{"prompt": "3"}\n')
    (tmp_path / "rewards.py").write_text("def short(completion):\n    return 1.0 / len(completion)\n")
    overrides = [
        "environment.kind=dataset",
        f"environment.data={tmp_path}/tasks.jsonl",
        f"environment.reward={tmp_path}/rewards.py:short",
    ]
    diff = rescore(store, ["trl"], "judged", overrides=overrides)
    assert diff.counts["flipped"] == 16
    rewards = read_table(find_datasets(store, ["judged"])[0], "rollouts")["reward"].to_pylist()
    assert rewards[:2] == [1 / len("The answer is 6."), 1 / len("I pass.")]
    with pytest.raises(ConfigError, match=r"names no environment to judge with\. Name one: --set environment\.kind="):
        rescore(store, ["atif"], "other")


def test_conversations_get_tokens_only_for_supervised_training(base: Run, tmp_path: Path) -> None:
    store = base.config.store
    import_files(store, "trl", completions(tmp_path / "c"))
    other = [{"role": "user", "content": "long"}], [{"role": "assistant", "content": "nine " * 600}]
    frame = pd.read_parquet(tmp_path / "c" / "completions_00001.parquet")
    long = {"step": 2, "prompt": other[0], "completion": other[1], "right": 1.0, "advantage": 0.0}
    pd.concat([frame, pd.DataFrame([long])]).to_parquet(tmp_path / "c" / "completions_00001.parquet")
    import_files(store, "long", tmp_path / "c")
    config = offline_config(store, base.run_id, "new", ["trl", "long"], "sft")
    refused = offline_config(store, base.run_id, "grpo", ["trl"], "grpo")
    with pytest.raises(
        ConfigError, match=r"is grpo, but dataset trl@v000001 was imported without token IDs.*--method sft"
    ):
        find_datasets(store, ["trl"], replace(base, config=refused))
    whole, masked = find_datasets(store, ["trl", "long"], replace(base, config=config))
    assert whole.uri.split("/")[-2] == "trl-tokens"
    assert read_manifest(whole).details["written"]
    assert read_table(whole, "turns").num_rows == 16
    assert (masked.counts["completed"], masked.counts["masked"]) == (16, 1)
    [reason] = {
        row["failure_detail"] for row in read_table(masked, "rollouts").to_pylist() if row["status"] == "masked"
    }
    assert "generation.max_model_len is 512" in reason
    assert find_datasets(store, ["trl"], replace(base, config=config)) == [whole], "made once"


@pytest.mark.real
def test_a_policy_learns_the_best_completions_of_trl(base: Run, tmp_path: Path) -> None:
    import_files(base.config.store, "best", completions(tmp_path / "c"))
    keys = ["offline.epochs=2", "offline.groups=4"]
    run = train_to_the_end(offline_config(base.config.store, "base", "best", ["best"], "rejection", overrides=keys))
    losses = [read_manifest(reference).metrics for k in (1, 4) if (reference := run.stage(k, "train").reference())]
    assert [each["train/num_selected"] for each in losses] == [4, 4], "the better of two in each group"
    assert losses[1]["train/nll"] < losses[0]["train/nll"]
