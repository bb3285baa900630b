"""NexRL's own workers, plain functions that import `nexrl`, are played as they are."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.models import Sampling
from roundhouse.errors import ConfigError
from roundhouse.generation.protocol import Completion
from roundhouse.plugins.nexrl.section import WorkerEnvironment
from roundhouse.rollout.agents import RolloutAttempt, play_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Status
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config, says, spec_of

WORKER = """
from nexrl import BaseRolloutWorker
from typing import Any

class MyRolloutWorker(BaseRolloutWorker):
    def step(self, task: dict[str, Any]) -> str | None:
        if "prompt" not in task:
            return None
        prompt = task["prompt"]
        result = self._llm_client.completion(prompt, temperature=0.7)
        trajectory = {
            "prompt": prompt,
            "response": result["response"],
            "finish_reason": result["finish_reason"],
            "custom_metadata": task.get("metadata", {}),
            "model_tag": self._llm_client._model_tag
        }
        return self._put_trajectory(trajectory)


class Configured(MyRolloutWorker):
    def __init__(self, config):
        super().__init__(config)
        self.prompt = config.prompt + self._config["suffix"]

    def step(self, task):
        return super().step({**task, "prompt": self.prompt})


class Validating(MyRolloutWorker):
    def step(self, task):
        if self._is_running_validate:
            answer = self._llm_client.generate([{"role": "user", "content": self._get_validate_task()["prompt"]}])
            return self._put_validate_trajectory({"response": answer["response"], "reward": 0.25})
        return "fail"


class Logging(MyRolloutWorker):
    def step(self, task):
        result = self._llm_client.completion(task["prompt"], model="any", stop=["5", " is"], max_tokens=20)
        self._activity_tracker.experiment_logger_post(
            backend="wandb", data={"length": len(result["response"]), "text": "no number"}, step=3, content="hello"
        )
        with self._activity_tracker.track(self.get_module_name(), "judging"):
            return self._put_trajectory({"response": result["response"]})


class Taking(MyRolloutWorker):
    def step(self, task):
        first, second = self._get_rollout_task(), self._get_rollout_task()
        assert first == task and second is None
        self._put_rollout_task(task)
        return None


class Neither(BaseRolloutWorker):
    pass
"""
EVALUATOR = """
from nexrl.rollout_worker import (
    Evaluator,
    BaseEvaluationTarget,
    EvaluationRunResult
)

class MyTaskEvaluator(Evaluator):
    def evaluate(self, data, evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        reward = 1.0 if evaluation_target.final_answer.strip() == data["ground_truth"] else 0.0
        return EvaluationRunResult(reward=reward, metrics={"exact_match": reward})
"""
WARM = SAMPLING.model_copy(update={"temperature": 0.7})


def environment(directory: Path, worker: str, **changes: Any) -> WorkerEnvironment:
    (directory / "my_worker.py").write_text(WORKER)
    (directory / "my_evaluator.py").write_text(EVALUATOR)
    (directory / "items.jsonl").write_text('{"prompt": "2+2?", "ground_truth": "4"}\n{"ground_truth": "5"}\n')
    fields = {"worker": f"my_worker.py:{worker}", "evaluator": "my_evaluator.py:MyTaskEvaluator"}
    data = {"workspace": str(directory), "train_data": str(directory / "items.jsonl")}
    return WorkerEnvironment.model_validate({"kind": "worker", **fields, **data, **changes})


async def play(
    config: WorkerEnvironment,
    policy: Any = None,
    *,
    row: int = 0,
    on_policy: bool = True,
    sampling: Sampling = WARM,
    **limits: Any,
) -> RolloutAttempt:
    policy = policy or ScriptedPolicy(by_turn(says(" 4")))
    async with open_environment(config) as client:
        spec = spec_of(client.tasks("train")[row])
        return await play_rollout(spec, policy, client, rollout_config(**limits), sampling, on_policy=on_policy)


async def test_the_worker_and_the_evaluator_of_nexrls_guide_are_played_as_they_are(tmp_path: Path) -> None:
    rollout = (await play(environment(tmp_path, "MyRolloutWorker"))).rollout
    assert (rollout.status, rollout.reward, rollout.metrics["exact_match"]) == (Status.COMPLETED, 1.0, 1.0)
    [turn] = rollout.turns
    assert turn.generation_token_ids
    assert len(turn.generation_log_probs) == len(turn.generation_token_ids)


async def test_its_results_and_the_runs_sampling_mean_what_they_mean_of_any_worker(tmp_path: Path) -> None:
    config = environment(tmp_path, "MyRolloutWorker")
    nothing = (await play(config, row=1)).rollout
    assert (nothing.status, nothing.failure_code) == (Status.FAILED, "no_trajectory")
    cold = (await play(config, sampling=SAMPLING)).rollout
    assert (cold.status, cold.failure_code) == (Status.FAILED, "bad_task_row")
    assert "generation.sampling.temperature=1.0" in cold.failure_detail


async def test_a_constructor_with_a_config_gets_the_parameters(tmp_path: Path) -> None:
    config = environment(tmp_path, "Configured", parameters={"prompt": "1+", "suffix": "3?"})
    rollout = (await play(config)).rollout
    assert [item["content"] for item in rollout.items if item.get("role") == "user"] == ["1+3?"]
    with pytest.raises(ConfigError, match=r"environment\.parameters has no prompt; it has suffix"):
        open_environment(environment(tmp_path, "Configured", parameters={"suffix": "3?"}))


async def test_in_an_evaluation_the_names_of_validation_work(tmp_path: Path) -> None:
    rollout = (await play(environment(tmp_path, "Validating"), on_policy=False)).rollout
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 0.25)
    assert (await play(environment(tmp_path, "Validating"))).rollout.status is Status.FAILED


async def test_a_worker_may_name_a_model_stop_its_reply_and_log_metrics(tmp_path: Path) -> None:
    """Each of these failed the rollout."""
    policy = ScriptedPolicy(by_turn(says("4 is right, not 5")))
    rollout = (await play(environment(tmp_path, "Logging"), policy)).rollout
    assert (rollout.status, rollout.reward, rollout.metrics["length"]) == (Status.COMPLETED, 1.0, 1.0)
    assert "text" not in rollout.metrics


async def test_a_task_that_a_worker_puts_back_is_played_again(tmp_path: Path) -> None:
    rollout = (await play(environment(tmp_path, "Taking"))).rollout
    assert (rollout.status, rollout.failure_code) == (Status.FAILED, "re_rollout")


def test_a_class_that_plays_nothing_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not define step or run_agent"):
        open_environment(environment(tmp_path, "Neither"))


class Together(ScriptedPolicy):
    """Answers when so many calls wait."""

    def __init__(self, together: int) -> None:
        super().__init__(by_turn(says("4")))
        self._meeting = asyncio.Barrier(together)

    async def complete(self, *given: Any) -> Completion:
        await self._meeting.wait()
        return await super().complete(*given)


async def test_as_many_play_at_once_as_rollouts_are_in_flight(tmp_path: Path) -> None:
    config = rollout_config(concurrency=100, timeout_seconds=30)
    async with open_environment(environment(tmp_path, "MyRolloutWorker")) as client:
        specs = plan_rollouts(client.tasks("train")[:1], 100, seed=0, iteration=0)
        rollouts = await collect(specs, Together(100), client, config, WARM)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 100


async def test_a_time_limit_ends_the_thread_too(tmp_path: Path) -> None:
    attempt = await play(environment(tmp_path, "MyRolloutWorker"), Together(2), timeout_seconds=0.2)
    assert (attempt.rollout.status, attempt.rollout.failure_code) == (Status.FAILED, "rollout_timeout")
    [*threads] = (thread for thread in threading.enumerate() if thread.name == "roundhouse-function")
    await asyncio.to_thread(lambda: [thread.join(10) for thread in threads])
    assert not any(thread.is_alive() for thread in threads)
