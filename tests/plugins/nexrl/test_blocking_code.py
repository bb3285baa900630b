"""Workers and evaluators that block: their rollout ends by its limit, the others are not touched."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from roundhouse.plugins.nexrl import EvaluationRunResult, Evaluator
from roundhouse.plugins.nexrl.client import WorkerClient
from roundhouse.plugins.nexrl.section import WorkerEnvironment
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from tests.gym.blocking_world import score
from tests.gym.collecting import collect
from tests.gym.playground import (
    SAMPLING,
    ScriptedPolicy,
    anything,
    by_turn,
    comparable,
    rollout_config,
    says,
)
from tests.gym.test_blocking_code import ROWS, costs_its_rollout_alone
from tests.plugins.nexrl.blocking_workers import Player

pytestmark = pytest.mark.real


class Exact(Evaluator):
    """An evaluator of a worker."""

    def evaluate(self, data: dict[str, Any], target: Any) -> EvaluationRunResult:
        return EvaluationRunResult(score(data, []))


@pytest.mark.parametrize("kind", ["evaluator", "Player", "PlainPlayer"])
async def test_a_worker_or_its_evaluator_that_blocks_costs_its_rollout_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    if kind == "evaluator":
        fields = {"worker": "simple", "evaluator": f"{__name__}:Exact", "train_data": str(file)}
    else:
        fields = {"worker": f"{Player.__module__}:{kind}", "train_data": str(file)}
    await costs_its_rollout_alone(WorkerEnvironment.model_validate({"kind": "worker", **fields}), monkeypatch)


async def test_rollouts_of_a_worker_in_a_process_of_its_own_are_those_in_this_process(tmp_path: Path):
    rows = [{"how": how, "prompt": "x", "task_id": how or "fine"} for how in ("", "nothing", "raises", "again")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"worker": f"{Player.__module__}:Player", "train_data": str(tmp_path / "rows.jsonl")}
    config = rollout_config(max_turns=4, retry={"attempts": 1})
    played = []
    local = WorkerClient(Player, "Player", [{"group_id": row["task_id"], **row, "run_id": 0} for row in rows])
    hosted = open_environment(WorkerEnvironment.model_validate({"kind": "worker", **fields}))
    for client in (local, hosted):
        async with client as environment:
            specs = plan_rollouts(environment.tasks("train"), 2, 0, 0)
            played.append(await collect(specs, ScriptedPolicy(anything), environment, config, SAMPLING))
    assert [comparable(rollout) for rollout in played[0]] == [comparable(rollout) for rollout in played[1]]
    codes = {each.group_id: each.failure_code for each in played[0]}
    assert codes == {"fine": "", "nothing": "no_trajectory", "raises": "worker_failed", "again": "verifier_failed"}


async def test_code_that_a_rollout_left_behind_asks_for_nothing_more(tmp_path: Path):
    file = tmp_path / "answer"
    row = {"how": "late", "prompt": "x", "task_id": "late", "file": str(file)}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    fields = {"worker": f"{Player.__module__}:Player", "train_data": str(tmp_path / "rows.jsonl")}
    async with open_environment(WorkerEnvironment.model_validate({"kind": "worker", **fields})) as environment:
        [spec] = plan_rollouts(environment.tasks("train"), 1, 0, 0)
        policy = ScriptedPolicy(by_turn(says("done")))
        rollout = await run_rollout(spec, policy, environment, rollout_config(), SAMPLING)
        async with asyncio.timeout(60):
            while not file.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
    assert (rollout.reward, len(rollout.turns)) == (1.0, 1)
    assert "the rollout has ended" in file.read_text()
