"""Real runs that end before their last iteration: by the end of the data, or by a good enough metric."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.health.heartbeat import state_of
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind
from tests.asynchrony.place import SECONDS, Place

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUESTIONS = [f"What is 2*3+{number}?" for number in range(5)]


@pytest.fixture(scope="module")
def runs(place: Place) -> Iterator[dict[str, Run]]:
    """Finished runs. `data`: one pass over a file by a custom loader. `target`: an overlapped run with a target reached at
    once."""
    file = place.directory / "questions.txt"
    file.write_text("\n".join([*QUESTIONS[:2], "1+" * 100 + "1?", *QUESTIONS[2:]]))
    pytest.importorskip("roundhouse.plugins.nexrl")
    own = Path(__file__).parents[1] / "plugins/nexrl/own_data.py"
    keys: dict[str, dict[str, Any]] = {
        "data": {
            "iterations": 9,
            "environment": {
                "kind": "worker",
                "worker": "simple",
                "evaluator": f"{own}:Parity",
                "data_loader": f"{own}:Questions",
                "train_data": str(file),
            },
            "rollout": {
                "epochs": 1,
                "prompts_per_iteration": 2,
                "group_size": 4,
                "shuffle": False,
                "drop_last": True,
                "max_prompt_tokens": 100,
            },
            "evaluation": {"every": None, "before_training": False},
            "asynchrony": {},
        },
        "target": {"finish": {"metric": "reward/mean", "at_least": 0.0}},
    }
    engines = {name: place.start_engine(f"engine-finish-{name}", 0.05) for name in keys}
    try:
        for name, engine in engines.items():
            keys[name]["generation"] = place.settings(name)["generation"] | {"engine_url": engine.url}
        started = {name: place.train(f"finish-{name}", **keys[name]) for name in keys}
        for name, process in started.items():
            assert process.wait(SECONDS) == 0, place.log(f"finish-{name}").read_text()
        assert place.train("finish-target", **keys["target"]).wait(SECONDS) == 0
        yield {name: place.run(f"finish-{name}") for name in keys}
    finally:
        for engine in engines.values():
            engine.stop()


def test_a_run_ends_with_its_data_in_the_loaders_order_and_without_what_fills_no_iteration(
    runs: dict[str, Run],
) -> None:
    run = runs["data"]
    assert state_of(run) == "finished"
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.policy_version == 2, "five questions fit, two an iteration, and the fifth is left out"
    asked = []
    for k in (1, 2):
        collected = run.stage(k, StageKind.COLLECT).reference()
        assert collected is not None
        by_group = {rollout.group_id: rollout for rollout in read_rollouts(collected)}
        asked.append({str(rollout.task["item"]["prompt"]) for rollout in by_group.values()})
    assert asked == [{QUESTIONS[4], QUESTIONS[3]}, {QUESTIONS[2], QUESTIONS[1]}]


def test_a_run_ends_with_the_iteration_that_reaches_its_target_and_evaluates_it(runs: dict[str, Run]) -> None:
    run = runs["target"]
    summary = run.summary()
    assert summary is not None
    assert (summary["iterations"], summary["iterations_wanted"], state_of(run)) == (1, 1, "finished")
    assert run.stage(1, StageKind.EVALUATE).reference() is not None
    assert run.stage(2, StageKind.TRAIN).reference() is None


def test_a_finished_run_is_not_begun_again(runs: dict[str, Run], place: Place) -> None:
    assert runs["target"].run_id == "finish-target"
    assert "Run finish-target is finished" in place.log("finish-target").read_text()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"finish": {"at_least": 0.9}, "evaluation": {"every": 0}}, r"evaluation\.every is 0"),
        ({"rollout": {"epochs": 2}, "offline": {"datasets": ["d"]}}, r"offline\.epochs"),
        (
            {"rollout": {"epochs": 2}, "environment": {"kind": "mixture", "environments": {"a": {"kind": "sort"}}}},
            r"rollout\.epochs is 2, but a mixture draws its tasks by weight",
        ),
        (
            {
                "rollout": {"drop_last": True},
                "environment": {"kind": "mixture", "environments": {"a": {"kind": "sort"}}},
            },
            r"rollout\.drop_last is True",
        ),
        ({"rollout": {"shuffle": False, "dynamic_sampling": {}}}, "draws each round in another order"),
    ],
)
def test_an_end_that_cannot_come_is_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_config({"run_id": "r"} | keys)
