"""`runs lineage` and `runs compare`: the training data of a checkpoint, the fate of a row, differences of two runs."""

import json

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.errors import StoreError
from roundhouse.sql.database import QueryError
from roundhouse.sql.lineage import Segment, compare_runs, prompt_of, row_history, segments_of, trained_on
from roundhouse.store.run import load_run
from tests.sql.stores import write_run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`base`: versions 1 to 3. `wide`: forked from its version 2, then versions 3 and 4. `other`: on its own."""
    store = str(tmp_path_factory.mktemp("lineage") / "store")
    base = write_run(store, "base", iterations=3)
    write_run(
        store,
        "wide",
        seed=5,
        first=3,
        iterations=4,
        resume={"mode": "from_path", "path": base.checkpoint(2).location.uri},
    )
    write_run(store, "other", iterations=1, train={"optimizer": {"learning_rate": 0.5}})
    return store


def test_a_version_was_trained_on_every_iteration_before_it(store: str) -> None:
    found = trained_on(store, "base", 2)
    assert [(entry["run_id"], entry["iteration"], entry["base_version"]) for entry in found.iterations] == [
        ("base", 1, 0),
        ("base", 2, 1),
    ]
    assert [entry["policy_versions"] for entry in found.iterations] == [[0], [1]]
    assert {entry["seed"] for entry in found.iterations} == {0}
    assert all(entry["code_versions"] and entry["config_digests"] for entry in found.iterations)
    # Of 12 rollouts an iteration, one failed and one was masked.
    assert [entry["rollouts"] for entry in found.iterations] == [10, 10]
    assert {row["row"]: (row["rollouts"], row["iterations"]) for row in found.rows} == {
        "sum/0": (6, [1, 2]),
        "sum/1": (6, [1, 2]),
        "sum/2": (8, [1, 2]),
    }
    assert found.checkpoint is not None


def test_a_fork_was_trained_on_its_parents_iterations_up_to_the_fork(store: str) -> None:
    assert segments_of(store, "wide", 4) == [Segment("wide", 3, 4), Segment("base", 1, 2)]
    found = trained_on(store, "wide", 4)
    assert [(entry["run_id"], entry["iteration"], entry["seed"]) for entry in found.iterations] == [
        ("base", 1, 0),
        ("base", 2, 0),
        ("wide", 3, 5),
        ("wide", 4, 5),
    ]
    assert {row["row"]: row["rollouts"] for row in found.rows} == {"sum/0": 12, "sum/1": 12, "sum/2": 16}


def test_a_checkpoint_that_retention_deleted_is_still_explained(tmp_path) -> None:
    store = str(tmp_path / "store")
    run = write_run(store, "base", iterations=2)
    run.checkpoint(1).location.delete_tree()
    found = trained_on(store, "base", 1)
    assert found.checkpoint is None
    assert [entry["iteration"] for entry in found.iterations] == [1]


def test_a_parent_that_is_gone_is_told_and_not_passed_over(tmp_path) -> None:
    store = str(tmp_path / "store")
    base = write_run(store, "base", iterations=1)
    write_run(
        store, "wide", first=2, iterations=2, resume={"mode": "from_path", "path": base.checkpoint(1).location.uri}
    )
    load_run(store, "base").location.delete_tree()
    found = trained_on(store, "wide", 2)
    assert "run base up to version 1 is not in this store" in found.segments[-1].note
    assert [entry["run_id"] for entry in found.iterations] == ["wide"]


def test_a_row_is_followed_into_versions_and_forks(store: str) -> None:
    found = {(entry["run_id"], entry["iteration"]): entry for entry in row_history(store, "sum/1")}
    assert set(found) == {("base", 1), ("base", 2), ("base", 3), ("wide", 3), ("wide", 4), ("other", 1)}
    first, third = found["base", 1], found["base", 3]
    assert (first["rollouts"], first["trained"], first["refused"]) == (4, 3, ["masked_by_environment"])
    assert (first["first_version"], first["newest_version"], first["forks"]) == (1, 3, ["wide"])
    assert third["forks"] == []
    assert [entry["iteration"] for entry in row_history(store, "sum/1", ["other"])] == [1]


def test_what_is_not_there_is_told(store: str) -> None:
    with pytest.raises(StoreError, match="has not trained a version 9; its newest is 3"):
        trained_on(store, "base", 9)
    with pytest.raises(StoreError, match="Runs there: base, other, wide"):
        trained_on(store, "none", 1)
    with pytest.raises(QueryError, match='No iteration collected the row "it\'s"'):
        row_history(store, "it's")
    with pytest.raises(QueryError, match=r"Available: .*reward/mean"):
        compare_runs(store, "base", "other", ["reward/meen"])


def test_runs_are_compared_by_what_differs(store: str) -> None:
    found = compare_runs(store, "base", "other")
    assert set(found.differences) == {"train.optimizer.learning_rate"}
    assert found.differences["train.optimizer.learning_rate"][1] == 0.5
    by_iteration = found.curves["reward/mean"]
    assert by_iteration[1][0] == by_iteration[1][1]  # the same seed, the same rollouts
    assert by_iteration[2][1] is None


def test_the_commands_tell_people_and_programs(store: str) -> None:
    def said(*words: str) -> str:
        result = CliRunner().invoke(app, ["runs", *words, "--store", store])
        assert result.exit_code == 0, result.output
        return result.output

    assert json.loads(said("lineage", "wide", "4", "--json"))["segments"][1]["run_id"] == "base"
    assert "sum/0" in said("lineage", "base", "3")
    assert "no iteration made it" in said("lineage", "base", "0")
    assert json.loads(said("lineage", "--row", "sum/1", "--json"))["row"] == "sum/1"
    assert "versions 1 to 3" in said("lineage", "--row", "sum/1")
    assert json.loads(said("compare", "base", "other", "--json"))["curves"]
    assert "train.optimizer.learning_rate" in said("compare", "base", "other")


@pytest.mark.parametrize(
    ("task", "prompt"),
    [
        ('{"responses_create_params": {"input": "hi"}}', "hi"),
        ('{"responses_create_params": {"input": [{"role": "user", "content": [{"text": "a"}, {"text": "b"}]}]}}', "ab"),
        ('{"responses_create_params": {"input": [{"role": "system", "content": "s"}]}}', None),
        ("{}", None),
        ("not json", None),
        (None, None),
    ],
)
def test_the_prompt_of_a_row_is_what_the_user_says(task: str | None, prompt: str | None) -> None:
    assert prompt_of(task) == prompt


def test_tasks_whose_ids_end_in_a_number_stay_rows_of_their_own(tmp_path) -> None:
    store = str(tmp_path / "store")
    write_run(store, "issues", iterations=1, task_name="django#{}")
    assert [row["row"] for row in trained_on(store, "issues", 1).rows] == ["django#0", "django#1", "django#2"]
    assert row_history(store, "django#2")[0]["rollouts"] == 4
    with pytest.raises(QueryError, match="No iteration collected the row 'django'"):
        row_history(store, "django")
