"""Resumption of interrupted rollouts of workers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from roundhouse.environments.base import tool
from roundhouse.plugins.nexrl.base import AgentEvaluationTarget, BaseRolloutWorker, EvaluationRunResult
from roundhouse.plugins.nexrl.built_in import AgentRolloutWorker
from roundhouse.plugins.nexrl.client import WorkerClient
from roundhouse.rollout.replay import JOURNAL
from roundhouse.trajectories.records import Status
from tests.gym.interrupted import interrupted_before, resumed
from tests.gym.playground import (
    by_turn,
    calls,
    says,
    spec_of,
    written,
)
from tests.gym.test_journal import CONFIG, afresh, alone


async def test_a_worker_that_says_so_goes_on_with_its_finished_calls() -> None:
    class Librarian(AgentRolloutWorker):
        restoration = "replay"

        @tool("Look a word up.", word="The word.")
        async def define(self, task: dict[str, Any], word: str) -> str:
            return f"{word} is a word"

    item = {"task_id": "a", "prompt": "Look up."}
    client = WorkerClient(lambda llm: Librarian(llm, Always()), "librarian", [item])
    row = client.tasks("train")[0]
    script = by_turn(calls(("define", {"word": "x"})), calls(("define", {"word": "y"})), says("x y"))
    whole = await alone(client, row, script)
    assert whole.status is Status.COMPLETED
    parts = await interrupted_before(2, spec_of(row), script, client, CONFIG)
    rollout, policy, _ = await resumed(parts, spec_of(row), script, client, CONFIG)
    assert written(rollout) == written(whole)
    assert len(policy.seeds) == 1


class Doubtful(BaseRolloutWorker):
    """Asks a sub-agent before it continues."""

    restoration = "replay"

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        main = [{"role": "user", "content": "How many?"}]
        for _ in range(3):
            answer = await self.llm.generate(main)
            opinion = await self.llm.generate([{"role": "user", "content": f"Is it {answer['response']}?"}])
            main += [answer["message"], {"role": "user", "content": opinion["response"]}]
        return await self.put_trajectory(task, "x", result=EvaluationRunResult(1.0))


async def doubted(cut: int) -> tuple[Any, Any, WorkerClient, list[pa.Table]]:
    """A rollout of two conversations that was interrupted before a call: its spec, script and client, and the parts."""
    client = WorkerClient(Doubtful, "doubtful", [{"task_id": "a", "prompt": "How many?"}])
    spec, script = spec_of(client.tasks("train")[0]), lambda messages, seed: says(str(seed))
    return spec, script, client, await interrupted_before(cut, spec, script, client, CONFIG)


@pytest.mark.parametrize("cut", [3, 5])
async def test_each_conversation_of_a_worker_goes_on_with_its_own_tokens(cut: int) -> None:
    spec, script, client, parts = await doubted(cut)
    whole = await alone(client, spec.row, script)
    assert [turn.parent for turn in whole.turns] == [None, None, 0, None, 2, None]
    rollout, policy, _ = await resumed(parts, spec, script, client, CONFIG)
    assert written(rollout) == written(whole)
    assert len(policy.seeds) == 6 - cut


class Always:
    """Content with everything."""

    def evaluate(self, data: dict[str, Any], target: AgentEvaluationTarget) -> EvaluationRunResult:
        return EvaluationRunResult(reward=1.0)


async def test_a_call_whose_prompt_the_recorded_ones_do_not_give_starts_afresh() -> None:
    spec, script, client, parts = await doubted(3)
    events = [event for part in parts for event in part.to_pylist()]
    events[2]["parent"] = 1
    rollout, reason = await afresh([pa.Table.from_pylist(events, schema=JOURNAL)], spec, script, client)
    assert (reason, rollout.status) == ("other_prompt", Status.COMPLETED)
