"""A run's run.json is valid only while its configuration equals that of the run's creation."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import digest_of_tree, parse_config
from roundhouse.errors import ConfigError, StoreError
from roundhouse.sql.database import runs_rows
from roundhouse.store.run import load_run, open_run, readable_runs
from roundhouse.store.verification import verify


@pytest.mark.parametrize("edit", [{"seed": 777}, {"environment": {"kind": "custom", "target": "evil.py:Code"}}])
def test_an_edited_run_json_is_opened_by_nobody_and_named_by_verify(store_uri: str, edit: dict[str, object]) -> None:
    run = open_run(parse_config({"run_id": "r", "store": store_uri}))
    identity = json.loads(run.location.read("run.json"))
    identity["config"] |= edit
    run.location.write("run.json", json.dumps(identity).encode())
    with pytest.raises(StoreError, match=r"run\.json.*created with"):
        load_run(store_uri, "r")
    with pytest.raises(StoreError, match=r"run\.json.*created with"):
        open_run(run.config)
    for named in (None, "r"):
        (problem,) = verify(store_uri, named).problems
        assert problem.uri.endswith("runs/r/run.json")
        assert "edited" in problem.what


def test_a_run_json_of_before_a_key_was_added_is_whole(store_uri: str) -> None:
    run = open_run(parse_config({"run_id": "r", "store": store_uri}))
    identity = json.loads(run.location.read("run.json"))
    del identity["config"]["alerts"], identity["identity_digest"]
    identity["config_digest"] = digest_of_tree(identity["config"])
    run.location.write("run.json", json.dumps(identity).encode())
    assert load_run(store_uri, "r").config == run.config
    assert verify(store_uri).problems == []


@pytest.mark.parametrize("key", ["run_id", "uid", "created_at", "code_version"])
def test_the_digest_covers_the_whole_identity(store_uri: str, key: str) -> None:
    run = open_run(parse_config({"run_id": "r", "store": store_uri}))
    identity = json.loads(run.location.read("run.json"))
    identity[key] = 7.0 if key == "created_at" else "other"
    run.location.write("run.json", json.dumps(identity).encode())
    with pytest.raises(StoreError, match="the file was edited"):
        load_run(store_uri, "r")


ODD = {
    "deep": b"[" * 100_000,
    "not an object": b"[]",
    "no time": {"created_at": "x"},
    "no number": {"created_at": float("nan")},
    "no parent": {"parent": "base"},
    "no mapping": {"config": ["a"], "config_digest": digest_of_tree(["a"])},  # type: ignore[arg-type]
    "no section": {"config": {"rollout": 3}, "config_digest": digest_of_tree({"rollout": 3})},
    "no environment": {"config": {"environment": "a"}, "config_digest": digest_of_tree({"environment": "a"})},
}


@pytest.fixture(params=ODD, ids=str)
def odd_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with a good run and one with a damaged run.json."""
    store = str(tmp_path / "store")
    good, odd = (open_run(parse_config({"run_id": name, "store": store})) for name in ("good", "odd"))
    change = ODD[request.param]
    if not isinstance(change, bytes):
        identity = json.loads(odd.location.read("run.json")) | change
        del identity["identity_digest"]
        change = json.dumps(identity).encode()
    odd.location.write("run.json", change)
    good.begin(good.checkpoint(0), policy_version=0).commit()
    return store


def test_one_odd_run_json_hides_no_other_run(odd_store: str, caplog: pytest.LogCaptureFixture) -> None:
    assert [run.run_id for run in readable_runs(odd_store)] == ["good"]
    assert "run odd is left out" in caplog.text
    assert "odd/run.json" in caplog.text
    assert "good" in [row["run_id"] for row in runs_rows(odd_store, ["good", "odd"])]
    listed = CliRunner().invoke(app, ["runs", "list", "--json", "--store", odd_store])
    assert [each["run_id"] for each in json.loads(listed.stdout)] == ["good"]
    verify(odd_store)
    with pytest.raises((StoreError, ConfigError), match=r"odd/run\.json"):
        load_run(odd_store, "odd")


def test_a_store_without_a_readable_run_is_an_error(tmp_path: Path) -> None:
    run = open_run(parse_config({"run_id": "odd", "store": str(tmp_path)}))
    run.location.write("run.json", b"[" * 100_000)
    with pytest.raises(StoreError, match="RecursionError"):
        readable_runs(str(tmp_path))
    (problem,) = verify(str(tmp_path)).problems
    assert problem.uri.endswith("odd/run.json")


def test_a_run_of_an_older_version_and_its_forks_draw_tasks_as_they_began(store_uri: str) -> None:
    run = open_run(parse_config({"run_id": "old", "store": store_uri}))
    assert run.first_draw == 1
    identity = json.loads(run.location.read("run.json"))
    del identity["first_draw"], identity["identity_digest"]
    run.location.write("run.json", json.dumps(identity).encode())
    old = open_run(run.config)
    assert (old.first_draw, load_run(store_uri, "old").first_draw) == (0, 0)
    attempt = old.begin(old.checkpoint(0), policy_version=0)
    attempt.commit()
    fork = {"resume": {"mode": "from_path", "path": old.checkpoint(0).location.uri}}
    assert open_run(parse_config({"run_id": "fork", "store": store_uri, **fork})).first_draw == 0
    counted = {"rollout": {"epochs": 1}}
    assert open_run(parse_config({"run_id": "counted", "store": store_uri, **fork, **counted})).first_draw == 1
