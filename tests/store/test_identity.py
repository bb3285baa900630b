"""A run's run.json is believed only as long as its configuration is the one that the run was created with."""

import json

import pytest

from roundhouse.config.loading import digest_of_tree, parse_config
from roundhouse.errors import StoreError
from roundhouse.store.run import load_run, open_run
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
    del identity["config"]["alerts"]
    identity["config_digest"] = digest_of_tree(identity["config"])
    run.location.write("run.json", json.dumps(identity).encode())
    assert load_run(store_uri, "r").config == run.config
    assert verify(store_uri).problems == []
