"""A real run on a mixture: NeMo Gym's servers started by the run, an environment with a judge in the collector, and a program
with a sub-agent."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundhouse.environments.calculator import Calculator
from roundhouse.http.ports import HttpThread
from roundhouse.stages.collect import read_rollouts
from roundhouse.stages.cost import bill_of
from roundhouse.stages.datasets import dataset_versions
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest, read_table
from roundhouse.trajectories.records import Status
from tests.asynchrony.place import SECONDS, Place
from tests.gym.test_rubric import JudgeEndpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ALL = {"gym", "own", "team"}


@pytest.fixture(scope="module")
def run(place: Place) -> Iterator[Run]:
    """Two iterations; then a dataset of the same tasks is collected, and the last version evaluated once more."""
    pytest.importorskip("roundhouse.plugins.nemo_gym")
    from tests.plugins.nemo_gym.test_owned import TWO_AGENTS

    (place.directory / "gym.yaml").write_text(TWO_AGENTS)
    for split in ("train", "heldout"):
        rows = [
            dict(row) | {"agent_ref": {"type": "responses_api_agents", "name": "calc_agent"}}
            for row in Calculator().tasks(split)[:6]
        ]
        (place.directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gym = {
        "kind": "nemo_gym",
        "config_paths": [str(place.directory / "gym.yaml")],
        "train_tasks": str(place.directory / "train.jsonl"),
        "heldout_tasks": str(place.directory / "heldout.jsonl"),
    }
    sums = [{"question": f"What is {k}*2+1?", "answer": f"{2 * k + 1}"} for k in range(3, 9)]
    rows = [row | {"task_id": f"sum-{k}", "responses_create_params": {"input": []}} for k, row in enumerate(sums)]
    (place.directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    team = {
        "kind": "command",
        "command": [sys.executable, str(Path(__file__).parents[2] / "docs/examples/second_opinion.py")],
        "train_tasks": str(place.directory / "sums.jsonl"),
        "heldout_tasks": str(place.directory / "sums.jsonl"),
    }
    judge = JudgeEndpoint(lambda body: (200, f"Verdict: {'yes' if '7.' in body['messages'][1]['content'] else 'no'}"))
    endpoint = HttpThread(judge, "127.0.0.1", 0)
    judge.url = f"http://127.0.0.1:{endpoint.port}/v1"
    own = {"kind": "calculator", "rubric": judge.rubric(own_weight=1)}
    engine = place.start_engine("engine-mixture", 0.05)
    keys: dict[str, Any] = {
        "iterations": 2,
        "environment": {"kind": "mixture", "environments": {"gym": gym, "own": own, "team": team}},
        "generation": place.settings("mixture")["generation"] | {"engine_url": engine.url},
        "rollout": {"prompts_per_iteration": 6, "group_size": 4},
        "evaluation": {"every": None, "before_training": False, "tasks": 4},
        "asynchrony": {},
        "tracking": {"sinks": ["json_lines"]},
    }
    try:
        assert place.train("mixture", **keys).wait(SECONDS) == 0, place.log("mixture").read_text()
        file = str(place.directory / "mixture.yaml")
        for command in (["collect", file, "--name", "again"], ["evaluate", file]):
            asked = place.fork_server.start("roundhouse.cli", command, place.log("mixture-asked"), place.variables)
            assert asked.wait(SECONDS) == 0, place.log("mixture-asked").read_text()
        yield place.run("mixture")
    finally:
        engine.stop()
        endpoint.close()


def test_all_environments_are_trained_on_in_each_iteration_and_reported_by_name(run: Run) -> None:
    for k in (1, 2):
        collected = run.stage(k, StageKind.COLLECT).reference()
        assert collected is not None
        rollouts = read_rollouts(collected)
        assert {rollout.status for rollout in rollouts} <= {Status.COMPLETED, Status.TRUNCATED}
        assert {rollout.group_id.partition("/")[0] for rollout in rollouts} == ALL
        assert {name.split("/")[1] for name in read_manifest(collected).metrics if name.startswith("mixture/")} == ALL
        validated = run.stage(k, StageKind.VALIDATE).reference()
        assert validated is not None
        trained = read_table(validated, "sequences").column("group_id").to_pylist()
        assert {group.partition("/")[0] for group in trained} == ALL
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.policy_version == 2


def test_each_path_of_an_agent_with_a_sub_agent_is_validated_trained_and_counted(run: Run) -> None:
    for k in (1, 2):
        collected, validated, trained = (
            run.stage(k, kind).reference() for kind in (StageKind.COLLECT, StageKind.VALIDATE, StageKind.TRAIN)
        )
        assert collected is not None
        assert validated is not None
        assert trained is not None
        team = [rollout for rollout in read_rollouts(collected) if rollout.group_id.startswith("team/")]
        assert team
        assert {tuple(turn.parent for turn in rollout.turns) for rollout in team} == {(None, None, 0)}
        paths = Counter(read_table(validated, "sequences")["rollout_id"].to_pylist())
        assert {paths[rollout.rollout_id] for rollout in team} == {2}
        metrics = read_manifest(validated).metrics
        assert (
            metrics["validate/forks"] == metrics["validate/forks/new_conversation"] + metrics["validate/forks/branch"]
        )
        assert metrics["validate/forks/branch"] == metrics["validate/forks/new_conversation"] == len(team)
        assert metrics["validate/token_breaks"] == metrics["validate/quarantined"] == 0
        columns = {
            row["sequence_id"]: row
            for row in read_table(trained, "columns").select(["sequence_id", "trained", "advantage"]).to_pylist()
        }
        assert metrics["validate/sequences"] == len(columns)
        for rollout in team:
            spread = len({each.reward for each in team if each.group_id == rollout.group_id}) > 1
            main, sub_agent = (columns[f"{rollout.rollout_id}/{path}"] for path in (0, 1))
            assert main["trained"] == sub_agent["trained"] == spread
            assert main["advantage"] == pytest.approx(sub_agent["advantage"])
    assert any(row["trained"] for name, row in columns.items() if name.startswith("team/"))


def test_a_judge_rewards_one_of_them_and_is_on_the_bill(run: Run) -> None:
    tokens = 0.0
    for k in (1, 2):
        collected = run.stage(k, StageKind.COLLECT).reference()
        assert collected is not None
        own = [rollout for rollout in read_rollouts(collected) if rollout.group_id.startswith("own/")]
        assert {frozenset(rollout.reward_components) for rollout in own} == {frozenset({"right", "environment"})}
        assert all(
            rollout.metrics.get("judge_calls", 0) + rollout.metrics.get("judge_cached", 0) >= 1 for rollout in own
        )
        tokens += sum(rollout.metrics.get("judge_completion_tokens", 0) for rollout in own)
    assert bill_of(run)["tokens"]["judged"] >= tokens > 0


def test_its_metrics_are_lines_of_a_file(run: Run, place: Place) -> None:
    lines = (place.directory / "state" / "metrics" / "mixture.jsonl").read_text().splitlines()
    found = {line["iteration"]: line for line in map(json.loads, lines)}
    assert set(found) == {0, 1, 2}
    assert {"mixture/gym/reward/mean", "mixture/own/reward/mean"} <= found[2].keys()


def test_its_servers_are_started_to_collect_a_dataset_and_to_evaluate_too(run: Run) -> None:
    (dataset,) = dataset_versions(run.config.store, "again")
    assert {rollout.group_id.partition("/")[0] for rollout in read_rollouts(dataset)} == ALL
    evaluated = run.stage(2, StageKind.EVALUATE).reference()
    assert evaluated is not None
    assert read_manifest(evaluated).counts["failed"] == 0
    assert {rollout.group_id.partition("/")[0] for rollout in read_rollouts(evaluated)} == ALL
