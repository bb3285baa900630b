"""Requirements of a held-out evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.config.operations import with_set
from roundhouse.errors import ConfigError
from roundhouse.stages.evaluate import evaluate_version, evaluation_metrics, set_of, stage_of
from roundhouse.stages.report import evaluation_of, summarize
from roundhouse.store.run import Run, open_run
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table


def test_without_a_held_out_task_there_is_nothing_to_evaluate_on_and_the_key_is_named(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t", "responses_create_params": {"input": [{"role": "user", "content": "?"}]}}\n')
    environment = {"kind": "remote", "url": "http://127.0.0.1:1", "train_tasks": str(tasks)}
    policy = {"kind": "pretrained", "path": str(tmp_path)}
    given = {"run_id": "r", "store": str(tmp_path / "store"), "environment": environment, "policy": policy}
    run = open_run(parse_config(given))
    with pytest.raises(ConfigError, match=r"no held-out task.*environment\.heldout_tasks"):
        evaluate_version(run, 0, "http://127.0.0.1:1")
    assert run.stage(0, "evaluate").reference() is None


GIVEN = {
    "run_id": "r",
    "environment": {"kind": "sort", "digits": 3},
    "evaluation": {
        "tasks": 50,
        "sets": {"greedy": {"temperature": 0}, "others": {"environment": {"kind": "calculator"}, "tasks": 7}},
    },
}


def test_a_set_changes_what_it_names_and_nothing_else() -> None:
    config = parse_config(GIVEN)
    greedy, others = with_set(config, "greedy"), with_set(config, "others")
    assert (greedy.evaluation.temperature, greedy.evaluation.tasks, greedy.environment.kind) == (0, 50, "sort")
    assert (others.evaluation.temperature, others.evaluation.tasks, others.environment.kind) == (1.0, 7, "calculator")
    assert greedy.generation == others.generation == config.generation


def test_the_stage_of_a_set_is_told_from_all_others() -> None:
    assert [stage_of(None), stage_of("greedy")] == ["evaluate", "evaluate-greedy"]
    assert [set_of(stage) for stage in ("evaluate", "evaluate-greedy", "collect")] == [None, "greedy", None]


def test_the_metrics_of_a_set_have_its_name_and_reach_the_summary_under_it() -> None:
    plain, named = evaluation_metrics([]), evaluation_metrics([], name="greedy")
    assert named == {name.replace("evaluation/", "evaluation/greedy/", 1): value for name, value in plain.items()}
    manifests = {"evaluate": manifest({"evaluation/reward/mean": 0.2})} | {
        "evaluate-greedy": manifest({"evaluation/greedy/reward/mean": 0.5, "evaluation/greedy/tasks": 3.0})
    }
    summary = evaluation_of(4, manifests)
    assert summary["reward_mean"] == 0.2
    greedy = summary["sets"]["greedy"]
    assert (greedy["reward_mean"], greedy["tasks"], greedy["reward_low"]) == (0.5, 3.0, None)


def manifest(metrics: dict[str, float]) -> Any:
    return SimpleNamespace(metrics=metrics, counts={})


@pytest.mark.parametrize("name", ["Greedy", "a/b", ""])
def test_a_set_is_named_as_a_directory_can_be(name: str) -> None:
    with pytest.raises(ConfigError, match="sets"):
        parse_config({"run_id": "r", "evaluation": {"sets": {name: {}}}})


def evaluated(run: Run, version: int, rewards: list[float | None]) -> None:
    """Commit the evaluation of a version and of its set, one rollout a task; None is a failed rollout."""
    rollouts = [
        Rollout(f"task {n}", 0, {}, "e", Status.FAILED if reward is None else Status.COMPLETED, reward=reward)
        for n, reward in enumerate(rewards)
    ]
    run.begin(run.checkpoint(version), policy_version=version).commit()
    for stage, prefix in (("evaluate", "evaluation/"), ("evaluate-kept", "evaluation/kept/")):
        attempt = run.begin(run.stage(version, stage), policy_version=version)
        attempt.write_table("rollouts", rollouts_table(rollouts))
        attempt.commit(metrics={f"{prefix}reward/mean": 0.5})


def test_a_summary_has_the_change_of_a_set_task_by_task_with_its_error(tmp_path: Path) -> None:
    sets = {"kept": {"temperature": 0}}
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path), "evaluation": {"sets": sets}}))
    evaluated(run, 0, [1.0, 1.0, 1.0, 0.0, 1.0, None])
    assert summarize(run)["evaluation"]["changes"] == {}
    evaluated(run, 1, [1.0, 0.0, 1.0, 0.0, None, 1.0])
    [change] = summarize(run)["evaluation"]["changes"].values()
    assert change["change"] == pytest.approx(-1 / 4), "tasks with a reward in both"
    assert change["stderr"] == pytest.approx((3 / 4 / 3) ** 0.5 / 2)
    assert change["low"] < change["change"] < change["high"] <= 0
