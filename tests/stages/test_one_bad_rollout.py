"""One rollout at fault costs no other: the stage ends, the others are stored, and validation passes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import FailingRollouts
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest, read_table
from roundhouse.trajectories.records import Rollout, Status
from tests.stages.scripted_engine import ScriptedEngine

REPAIRED = "\ufffd"


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine().serving() as server:
        yield server


def opened(tmp_path: Any, how: str, **rollout: Any) -> Run:
    environment = {"kind": "custom", "target": "tests.stages.faulty_world:Faulty", "parameters": {"how": how}}
    plan = {
        "prompts_per_iteration": 4,
        "group_size": 4,
        "max_failed_fraction": 0.4,
        "retry": {"attempts": 1},
        "shuffle": False,
    }
    tree = {"run_id": "r", "store": str(tmp_path), "environment": environment, "rollout": plan | rollout}
    return open_run(parse_config(tree))


def collected(run: Run, engine: ScriptedEngine) -> list[Rollout]:
    """The rollouts of iteration 1; validation has accepted all but the failed ones."""
    weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
    reference = collect_iteration(run, 1, weights, engine.url)
    rollouts = read_rollouts(reference)
    validated = validate_iteration(run, 1, reference, 100)
    assert read_table(validated, "quarantine").num_rows == 0
    assert len(rollouts) == 16
    return rollouts


def failures(rollouts: list[Rollout]) -> dict[str, int]:
    return dict(Counter(each.failure_code for each in rollouts if each.status is Status.FAILED))


@pytest.mark.parametrize(
    ("how", "failed"),
    [
        ("a surrogate in the observation", {}),
        ("a surrogate in the task row", {}),
        ("a task row that is no JSON", {"bad_task_row": 4}),
        ("a surrogate in a metric's name", {}),
        ("a metric that is NaN", {}),
        ("a reward beyond float64", {"bad_reward": 4}),
        ("a reward beyond every limit", {"bad_reward": 4}),
        ("rewards that add up to infinity", {"bad_reward": 4}),
    ],
)
def test_a_rollout_at_fault_is_one_failure_or_none(
    how: str, failed: dict[str, int], tmp_path: Any, engine: ScriptedEngine
):
    rollouts = collected(opened(tmp_path, how), engine)
    assert failures(rollouts) == failed
    assert all(each.reward == 1.0 for each in rollouts if each.status is Status.COMPLETED)


def test_policy_and_record_have_the_same_repaired_text(tmp_path: Any, engine: ScriptedEngine):
    rollouts = collected(opened(tmp_path, "a surrogate in the observation"), engine)
    recorded = [item["content"] for each in rollouts for item in each.items if item["type"] == "message"]
    assert recorded.count(f"cut {REPAIRED}") == 4
    shown = [message["content"] for request in engine.requests for message in request["messages"]]
    assert shown.count(f"cut {REPAIRED}") == 4


def test_a_metric_that_is_no_number_is_left_out_and_counted(tmp_path: Any, engine: ScriptedEngine):
    run = opened(tmp_path, "a metric that is NaN")
    rollouts = collected(run, engine)
    assert [each.metrics.get("ratio") for each in rollouts].count(None) == 4
    metrics = read_manifest(run.stage(1, "collect").reference()).metrics  # type: ignore[arg-type]
    assert metrics["rollout/metrics_left_out"] == 4
    assert metrics["environment/ratio"] == metrics["reward/mean"] == 1.0


def test_an_engine_that_answers_text_as_a_number_fails_that_rollout(tmp_path: Any, engine: ScriptedEngine):
    def say(request: dict[str, Any]) -> str:
        engine.log_prob = "x" if len(engine.requests) == 3 else -0.5  # type: ignore[assignment]
        return "go"

    engine.say = say
    rollouts = collected(opened(tmp_path, "", concurrency=1), engine)
    assert failures(rollouts) == {"bad_reply": 1}
    assert "generation_log_probs holds a str" in next(each.failure_detail for each in rollouts if each.failure_code)


def test_the_bound_of_rewards_is_a_key(tmp_path: Any, engine: ScriptedEngine):
    rollouts = collected(opened(tmp_path / "raised", "a large reward", reward_limit=1e12), engine)
    assert sorted({each.reward for each in rollouts}) == [1.0, 2e9]
    rollouts = collected(opened(tmp_path / "default", "a large reward"), engine)
    assert failures(rollouts) == {"bad_reward": 4}
    assert "rollout.reward_limit=1e+06" in next(each.failure_detail for each in rollouts if each.failure_code)


def test_failures_that_repeat_stop_the_stage_with_their_first_cause(tmp_path: Any, engine: ScriptedEngine):
    with pytest.raises(FailingRollouts, match=r"16 of 16.*bad_reward: .*rollout\.reward_limit=0\.4.*Correct the cause"):
        collected(opened(tmp_path, "", reward_limit=0.4), engine)
