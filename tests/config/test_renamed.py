"""A key under an old name is refused with the new one in a user's configuration, and translated in a stored run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import digest_of_tree, flatten, load_config, parse_config
from roundhouse.config.renamed import RENAMED, renamed_in, translated
from roundhouse.errors import ConfigError
from roundhouse.store.location import Location
from roundhouse.store.run import load_run, open_run, run_ids


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"rollout": {"tasks": 8}}, "rollout.tasks: 8 is now rollout.prompts_per_iteration: 8"),
        (
            {"generation": {"running": "abort"}},
            "generation.running: abort is now generation.inflight_requests: restart",
        ),
        ({"generation": {"running": None}}, "generation.running: null is now generation.inflight_requests: null"),
        ({"asynchrony": {"refit": "finish"}}, "asynchrony.refit: finish is now asynchrony.refit: drain"),
        (
            {"rollout": {"distribution": {"kind": "none"}}},
            "rollout.distribution.kind: none is now rollout.distribution.kind: in_process",
        ),
        (
            {"placement": {"trainer_with_engine": "apart"}},
            "placement.trainer_with_engine: apart is now placement.colocation: spread",
        ),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"run_id": "r", **tree})
    assert sentence in str(refused.value)


def test_all_old_names_of_a_file_and_its_overrides_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run_id: r\ntrain: {updates: 4}\nevaluation: {approval: {training: waits}}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file, ["rollout.tasks=3"])
    lines = str(refused.value).splitlines()
    assert lines[0] == f"{file}:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "rollout.tasks",
        "train.updates",
        "evaluation.approval.training",
    ]


def test_a_stored_mode_that_was_sync_by_its_staleness_is_read_as_sync() -> None:
    stored = {"run_id": "r", "asynchrony": {"mode": "fully-async", "staleness": 0}}
    assert parse_config(translated(stored)).asynchrony.mode == "sync"
    stale = {"run_id": "r", "asynchrony": {"mode": "fully-async", "staleness": 1}}
    assert translated(stale) == stale


def test_todays_names_are_left_alone() -> None:
    tree = parse_config({"run_id": "r"}).model_dump(mode="json")
    assert renamed_in(tree) == []
    assert translated(tree) is tree


def test_every_new_name_is_a_key_and_no_old_one_is() -> None:
    offline, kubernetes = {"datasets": ["d"], "evaluate": False}, {"kind": "kubernetes"}
    algorithm = {"kind": "cross_entropy"}
    keys = flatten(parse_config({"run_id": "r"}).model_dump(mode="json")).keys()
    keys |= flatten(
        parse_config(
            {
                "run_id": "r",
                "offline": offline,
                "infra": kubernetes,
                "store": "s3://b/s",
                "train": {"algorithm": algorithm},
            }
        ).model_dump(mode="json")
    ).keys()
    assert [rename.new for rename in RENAMED if rename.new not in keys] == []
    assert [rename.old for rename in RENAMED if rename.old in keys and not rename.values] == []


def test_a_run_that_was_stored_under_old_names_opens_and_continues_under_the_new_ones(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    config = parse_config({"run_id": "r", "store": store, "rollout": {"prompts_per_iteration": 3}})
    place = open_run(config).location
    identity = json.loads(place.read("run.json"))
    for section, new, old in (
        ("rollout", "prompts_per_iteration", "tasks"),
        ("train", "minibatches", "updates"),
        ("placement", "colocation", "trainer_with_engine"),
    ):
        identity["config"][section][old] = identity["config"][section].pop(new)
    identity["config"]["placement"]["trainer_with_engine"] = "anywhere"
    identity["config_digest"] = digest_of_tree(identity["config"])
    del identity["identity_digest"]  # as runs of that time
    Location(f"{store}/runs/r").write("run.json", json.dumps(identity).encode())
    assert run_ids(store) == ["r"]
    assert load_run(store, "r").config == config
    assert open_run(config).config == config
