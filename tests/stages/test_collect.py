"""The collect stage over real HTTP, against a scripted engine with planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from roundhouse.collection import collector
from roundhouse.config.loading import parse_config
from roundhouse.environments.base import task_row
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.rollout.plan import round_tasks
from roundhouse.stages.collect import collect_dataset, collect_iteration, read_rollouts, training_tasks, with_epochs
from roundhouse.stages.datasets import TaskDraw
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.report import reaches_target
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_manifest, read_table
from roundhouse.trajectories.records import Status
from tests.generation.tiny import make_model
from tests.stages.scripted_engine import ScriptedEngine

ROLLOUTS = 12


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine().serving() as server:
        yield server


@pytest.fixture
def run(store_uri: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(collector, "FLUSH_SECONDS", 0.0)
    rollout = {
        "prompts_per_iteration": 3,
        "group_size": 4,
        "concurrency": 2,
        "retry": {"attempts": 1, "first_delay_seconds": 0.01},
    }
    return open_run(parse_config({"run_id": "r", "store": store_uri, "rollout": rollout}))


@pytest.fixture
def weights(run: Run) -> Reference:
    return run.begin(run.stage(1, "refit"), policy_version=0).commit()


def test_an_interrupted_collection_keeps_what_finished_and_makes_only_the_rest(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    engine.healthy = 5
    with pytest.raises(InfraError, match=r"of 12 rollouts failed.*engine_failed.*out of order"):
        collect_iteration(run, 1, weights, engine.url)
    assert run.stage(1, "collect").reference() is None
    engine.healthy = 10**6
    reference = collect_iteration(run, 1, weights, engine.url)
    assert len(engine.seeds) == len(set(engine.seeds)) == ROLLOUTS, "each rollout was generated once"
    rollouts = read_rollouts(reference)
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == ROLLOUTS
    assert all(rollout.status is Status.COMPLETED for rollout in rollouts)
    assert read_manifest(reference).attempt == 2


def test_a_complete_collection_is_not_done_again(run: Run, weights: Reference, engine: ScriptedEngine) -> None:
    reference = collect_iteration(run, 1, weights, engine.url)
    engine.healthy = 0
    assert collect_iteration(run, 1, weights, engine.url) == reference


def test_failures_within_the_limit_are_recorded_without_a_reward(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    engine.healthy = 10
    reference = collect_iteration(run, 1, weights, engine.url)
    rows = read_table(reference, "rollouts").to_pylist()
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 2
    assert {(row["reward"], row["failure_kind"]) for row in failed} == {(None, "infra")}
    assert (reference.counts["completed"], reference.counts["failed"]) == (10, 2)
    validated = validate_iteration(run, 1, reference, 10)
    assert validated.counts["failed"] == 2
    assert validated.counts["sequences"] == 10


def test_an_iteration_that_is_mostly_refused_stops_with_the_evidence_in_the_store(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    engine.log_prob = 0.5
    rollouts = collect_iteration(run, 1, weights, engine.url)
    with pytest.raises(DataError, match=r"12 of 12 rollouts were refused .*log_prob_value.*quarantine"):
        validate_iteration(run, 1, rollouts, 10)
    assert any(name.startswith("quarantine-") for name in run.stage(1, "validate").location.names())
    assert run.stage(1, "validate").reference() is None


def test_an_offline_dataset_lies_outside_the_run_and_is_collected_once(
    run: Run, weights: Reference, engine: ScriptedEngine
) -> None:
    reference = collect_dataset(run, "nightly", TaskDraw(3), weights, engine.url)
    assert reference.uri.endswith("/datasets/nightly/v000000-i000003")
    assert collect_dataset(run, "nightly", TaskDraw(3), weights, engine.url) == reference
    assert len(engine.seeds) == ROLLOUTS


def test_the_tasks_of_a_run_are_those_that_fit_in_the_order_and_for_the_passes_that_are_configured(
    tmp_path: Path,
) -> None:
    prompts = ["3*4+1", "30*40+10", "5*6+2", "7*8+3", "9*2+4", "6*6+6"]
    rows = [task_row(prompt, task_id=f"t{number}") for number, prompt in enumerate(prompts)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    model = make_model(tmp_path / "policy", seed=1)
    template = AutoTokenizer.from_pretrained(model).apply_chat_template
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    lengths = sorted(len(template(each, add_generation_prompt=True, return_dict=False)) for each in messages)

    def chosen(limit: int | None, epochs: int | None = None) -> tuple[list[str], int]:
        rollout = {
            "prompts_per_iteration": 2,
            "shuffle": False,
            "drop_last": True,
            "max_prompt_tokens": limit,
            "epochs": epochs,
        }
        tree = {
            "run_id": f"r{limit or 0}-{epochs or 0}",
            "store": str(tmp_path / "store"),
            "iterations": 9,
            "infra": {"state": str(tmp_path / "state")},
            "environment": {"kind": "remote", "url": "http://gym", "train_tasks": str(tmp_path / "rows.jsonl")},
            "evaluation": {"every": None, "before_training": False},
            "policy": {"kind": "pretrained", "path": str(model)},
            "rollout": rollout,
        }
        run = open_run(parse_config(tree))
        starting_policy(run)
        drawn = [
            row["task_id"]
            for iteration in range(1, 5)
            for row in round_tasks(training_tasks(run), run.config.rollout, 0, iteration, 1)
        ]
        return drawn, with_epochs(run).config.iterations

    everything = [f"t{number}" for number in range(6)]
    assert chosen(None, epochs=2) == ([*everything, "t0", "t1"], 6)
    fitting = [task for task in everything if task != "t1"]
    assert chosen(lengths[-2], epochs=1) == (fitting[:4] * 2, 2), "the fifth fills no iteration"
    assert chosen(lengths[-2])[1] == 9
    with pytest.raises(ConfigError, match=rf"the shortest prompt of 6 training tasks has {lengths[0]} tokens"):
        chosen(1)


LONG = "Take great care. " * 50


@pytest.mark.parametrize(
    ("params", "rollout", "fitting"),
    [
        ({"instructions": LONG}, {}, "b/t1"),
        ({"instructions": "Add."}, {"system_prompt": LONG}, "a/t0"),
        ({}, {"environments": {"a": {"system_prompt": LONG}}}, "b/t1"),
    ],
)
def test_the_prompt_that_has_to_fit_has_instructions_and_the_environments_system_prompt(
    tmp_path: Path, params: dict[str, Any], rollout: dict[str, Any], fitting: str
) -> None:
    rows = [task_row("3*4", task_id=f"t{place}", agent_ref={"name": name}) for place, name in enumerate("ab")]
    rows[0]["responses_create_params"] |= params
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    environments = {name: {"kind": "calculator"} for name in "ab"}
    tree = {
        "run_id": "r",
        "store": str(tmp_path / "store"),
        "infra": {"state": str(tmp_path / "state")},
        "environment": {"kind": "mixture", "environments": environments, "train_tasks": str(tmp_path / "rows.jsonl")},
        "policy": {"kind": "pretrained", "path": str(make_model(tmp_path / "policy", seed=1))},
        "rollout": {"max_prompt_tokens": 100} | rollout,
    }
    run = open_run(parse_config(tree))
    starting_policy(run)
    assert [row["task_id"] for row in training_tasks(run)] == [fitting]


def test_a_target_is_reached_by_its_metric(tmp_path: Path) -> None:
    def reaches(reward: float, **finish: Any) -> bool:
        tree = {"run_id": f"r{reward}", "store": str(tmp_path), "finish": finish}
        run = open_run(parse_config(tree))
        stage = run.stage(1, "collect")
        if stage.reference() is None:
            run.begin(stage, policy_version=0).commit(metrics={"reward/mean": reward})
        return reaches_target(run, 1)

    assert reaches(0.9, metric="reward/mean", at_least=0.9)
    assert not reaches(0.8, metric="reward/mean", at_least=0.9)
    assert not reaches(0.9, metric="reward/mean")
    assert not reaches(0.9, at_least=0.9), "no evaluation was made"
