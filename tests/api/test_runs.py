"""Runs of a store from Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.dataset as ds
import pytest

import roundhouse as rh
from roundhouse.errors import ConfigError, StoreError
from roundhouse.notebook import svg_curve
from tests.sql.stores import HOSTILE, write_run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("api") / "store")
    write_run(place, "r", said=HOSTILE)
    write_run(place, "other", seed=1, iterations=1)
    return place


def test_a_run_is_opened_by_its_name_or_its_directory(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rh.open_run("r", store).uri == rh.open_run(f"{store}/runs/r/").uri == f"file://{store}/runs/r"
    monkeypatch.setenv("ROUNDHOUSE_STORE", store)
    assert rh.open_run("r").run_id == "r"
    assert {run.run_id for run in rh.runs()} == {"r", "other"}
    with pytest.raises(StoreError, match=r"No run 'x' in .*Runs there: other, r"):
        rh.open_run("x")
    with pytest.raises(ConfigError, match="'a/b' does not name a run"):
        rh.open_run("a/b")
    with pytest.raises(StoreError, match=r"No store at .*nothing"):
        rh.runs(f"{store}/nothing")


def test_rows_are_those_of_the_iteration_and_split_that_are_asked_for(store: str) -> None:
    run = rh.open_run("r", store)
    assert run.rollouts().count() == 24
    rollouts = run.rollouts(iteration=2, split="train")
    assert len(rollouts) == 12
    assert set(rollouts.to_pandas()["iteration"]) == {2}
    assert len(run.rollouts(iteration=range(1, 3))) == 24
    counts = run.sequences(1).count(), run.quarantine(1).count(), run.turns(1, split="train").count()
    assert counts == (10, 1, 22)
    with pytest.raises(StoreError, match=r"no rollouts of iteration 7 .*Iterations with rollouts: 1, 2"):
        run.rollouts(iteration=7)
    unfinished = Path(store) / "runs/r/iterations/000003/collect"
    unfinished.mkdir(parents=True)
    (unfinished / "rollouts-a1.parquet").touch()
    with pytest.raises(StoreError, match=r"no rollouts of iteration 3 .*Iterations with rollouts: 1, 2\."):
        run.rollouts(iteration=3)
    shutil.rmtree(unfinished.parent)
    with pytest.raises(ConfigError, match="split is 'test'; run 'r' has: train, heldout"):
        run.rollouts(split="test")


def test_filters_and_columns_are_pushed_down_to_the_files(store: str) -> None:
    rows = rh.open_run("r", store).rollouts()
    failed = rows.filter(status="failed", iteration=[1, 2])
    assert failed.count() == 2
    assert failed.to_table(["rollout_id"]).column_names == ["rollout_id"]
    assert rows.filter(ds.field("reward") > 0).count() == sum(
        row["reward"] is not None and row["reward"] > 0 for row in rows
    )
    assert isinstance(failed.dataset, ds.Dataset)
    with pytest.raises(ConfigError, match=r"rollouts have no column 'rewrad'. Columns: .*reward"):
        rows.to_pandas(["rewrad"])


def test_metrics_are_a_data_frame_whose_plot_draws_what_few_iterations_have(store: str) -> None:
    metrics = rh.open_run("r", store).metrics()
    assert list(metrics.index) == [0, 1, 2]
    assert metrics.index.name == "iteration"
    longer = metrics.reindex(range(6))
    longer["evaluation/reward/mean"] = [None, 0.25, None, None, None, 0.75]
    axes = longer.plot(y="evaluation/reward/mean")
    (line,) = axes.get_lines()
    assert list(line.get_ydata()) == [0.25, 0.75]
    with pytest.raises(ConfigError, match=r"Metric 'evaluation/reward' is unknown.*evaluation/reward/mean"):
        longer.plot(y="evaluation/reward")


def test_a_statement_and_a_comparison_are_answered(store: str) -> None:
    statement = "SELECT iteration, count(*) AS n FROM rollouts WHERE run_id = ? GROUP BY 1 ORDER BY 1"
    assert rh.query(statement, store, values=["r"]).to_dict("list") == {"iteration": [1, 2], "n": [12, 12]}
    assert list(rh.query("SELECT DISTINCT run_id FROM rollouts", store, runs=["other"])["run_id"]) == ["other"]
    run = rh.open_run("r", store)
    assert "seed" in run.compare("other").differences
    with pytest.raises(ConfigError, match="not in"):
        run.compare(rh.RunHandle(rh.open_run("other", store)._run, "elsewhere"))


def test_html_shows_texts_of_the_policy_as_texts(store: str) -> None:
    run = rh.open_run("r", store)
    for shown in (run, rh.runs(store), run.rollouts(), run.turns(), run.sequences(), run.quarantine()):
        html = shown._repr_html_()
        assert html.startswith("<table>")
        assert "<script>" not in html
        assert "<img" not in html
    assert "<b>" not in svg_curve([(0, 1)], "<b>")


def test_a_fork_differs_by_the_keys_that_are_given(store: str) -> None:
    run = rh.open_run("r", store)
    with pytest.raises(ConfigError, match=r"environment is <object.*cannot hold.*file.py:Class"):
        run.fork("f", environment=object())
    with pytest.raises(StoreError, match=r"no checkpoint of version 9. It has: 0"):
        run.fork("f", at=9)
    with pytest.raises(ConfigError, match=r"iterations: Input should be greater than 0"):
        run.fork("f", at=0, iterations=0)
