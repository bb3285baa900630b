"""A stored rollout continues from any of its turns: earlier messages are unchanged, and only new turns are sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from roundhouse.config.loading import parse_config
from roundhouse.config.models import EnvironmentConfig, Sampling, ValidationConfig
from roundhouse.config.section import Section
from roundhouse.errors import StoreError
from roundhouse.generation.protocol import Completion
from roundhouse.plugins.lab.replays.branches import branch, branch_one
from roundhouse.plugins.lab.replays.rollouts import open_for_replay
from roundhouse.rollout.recording import Recording
from roundhouse.stages.collect import collect_iteration, read_rollouts
from roundhouse.stages.policy import delete_run
from roundhouse.store.run import open_run
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.schemas import chains_of, rebuild_prompts, sequences_table
from roundhouse.trajectories.validation import CollectionLimits, validate
from tests.gym.kinds import EACH_KIND, smallest
from tests.gym.playground import ScriptedPolicy, calls, rollout_config, says, turns_of
from tests.gym.recorded import demonstrated
from tests.stages.test_interrupted_collect import GuessingEngine

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


class SaysTheSame:
    """A policy that gives the recorded reply to each turn, and counts its calls."""

    def __init__(self, rollout: Rollout, environment: Any) -> None:
        self.recording = Recording(rollout, environment)
        self.stored = rollout
        self.asked: list[int] = []

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        given = self.stored.task["responses_create_params"]["input"]
        before = 0 if isinstance(given, str) else sum(message.get("role") == "assistant" for message in given)
        number = sum(message["role"] == "assistant" for message in messages) - before
        self.asked.append(number)
        turn = self.stored.turns[number]
        return Completion(
            message=self.recording._replies[number],
            finish_reason=turn.finish_reason,
            prompt_token_ids=rebuild_prompts(self.stored.turns)[number],
            generation_token_ids=turn.generation_token_ids,
            generation_log_probs=turn.generation_log_probs,
            policy_version=7,
            latency_seconds=0.0,
        )


def branched(config: EnvironmentConfig, rollout: Rollout, turn: int, sample: int = 0) -> tuple[Rollout, list[int]]:
    async def work() -> tuple[Rollout, list[int]]:
        async with open_for_replay(config) as environment:
            policy = SaysTheSame(rollout, environment)
            limits = rollout_config(max_turns=len(rollout.turns))
            return await branch_one(rollout, turn, sample, environment, policy, limits, Sampling()), policy.asked

    return asyncio.run(work())


@pytest.mark.parametrize("config", EACH_KIND)
def test_from_any_turn_of_any_environment_the_same_replies_lead_to_the_same_end(config: type[Section]) -> None:
    environment = smallest(config)
    draw = random.Random(1)
    stored = [each for each in demonstrated(environment, tasks=3, size=2) if each.status is Status.COMPLETED]
    assert stored
    for rollout in stored:
        turn = draw.randrange(len(rollout.turns))
        made, asked = branched(environment, rollout, turn)
        assert made.failure_detail == ""
        assert asked == list(range(turn, len(rollout.turns))), "only the new turns are generated"
        assert [str(item) for item in without_ids(made)] == [str(item) for item in without_ids(rollout)]
        assert (made.reward, made.status) == (rollout.reward, rollout.status)
        assert [each.trained for each in made.turns] == [number >= turn for number in range(len(rollout.turns))]
        assert made.group_id == f"{rollout.rollout_id}@{turn}"


def without_ids(rollout: Rollout) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in rollout.items]


def test_a_world_that_answers_otherwise_refuses_the_branch() -> None:
    config = CONFIG.validate_python({"kind": "custom", "target": "tests.plugins.example_environments.lookups:Lookup"})
    rollout = next(each for each in demonstrated(config, tasks=2, size=1) if len(each.turns) > 1)
    other = CONFIG.validate_python(
        {"kind": "custom", "target": "tests.plugins.example_environments.lookups:OtherAnswers"}
    )
    for turn in range(1, len(rollout.turns)):
        made, asked = branched(other, rollout, turn)
        assert (made.status, made.failure_code, made.reward) == (Status.FAILED, "not_rebuilt", None)
        assert made.failure_detail.startswith("other_answer")
        assert asked == [], "the policy is asked for nothing"


class Watched:
    """An agent that records the addresses of calls outside of the rollout, such as a judge's."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    async def play(self, attempt: Any, environment: Any) -> None:
        self.engine = attempt.engine
        await self.agent.play(attempt, environment)


def test_a_judge_of_a_branch_asks_the_live_policy_and_not_the_recording() -> None:
    config = CONFIG.validate_python({"kind": "calculator"})
    rollout = demonstrated(config, tasks=1, size=1)[0]

    async def work() -> None:
        async with open_for_replay(config) as environment:
            watched: Any = environment
            watched.agent = Watched(environment.agent)
            policy, limits = SaysTheSame(rollout, environment), rollout_config(max_turns=len(rollout.turns))
            made = await branch_one(rollout, len(rollout.turns) - 1, 0, environment, policy, limits, Sampling())
            assert made.reward == rollout.reward
            assert watched.agent.engine is policy

    asyncio.run(work())


def test_a_turn_that_is_not_there_is_refused() -> None:
    config = CONFIG.validate_python({"kind": "calculator"})
    rollout = demonstrated(config, tasks=1, size=1)[0]
    made, _ = branched(config, rollout, len(rollout.turns))
    assert "no_such_turn" in made.failure_detail


def test_only_the_new_turns_are_trained_on_whatever_version_made_the_others() -> None:
    config = CONFIG.validate_python({"kind": "custom", "target": "tests.plugins.example_environments.lookups:Lookup"})
    rollout = next(each for each in demonstrated(config, tasks=2, size=1) if len(each.turns) > 1)
    made, _ = branched(config, rollout, 1)
    assert [turn.policy_version for turn in made.turns] == [rollout.turns[0].policy_version] + [7] * (
        len(made.turns) - 1
    )
    table = sequences_table([(made, chains_of(made.turns))])
    trained = sum(sum(mask) for mask in table["loss_mask"].to_pylist())
    assert trained == sum(len(turn.generation_token_ids) for turn in made.turns[1:])
    other, _ = branched(config, rollout, 1, sample=1)
    result = validate(
        [made, other], ValidationConfig(), vocabulary_size=10**9, policy_version=7, terms=CollectionLimits(10**9, 7)
    )
    assert result.quarantine.num_rows == 0, result.quarantine.to_pylist()


@contextmanager
def engine_of(script: Callable[[list[dict[str, Any]], int], Any]) -> Iterator[GuessingEngine]:
    """An engine over HTTP that answers by the script."""
    engine = GuessingEngine()
    engine.policy = ScriptedPolicy(script)
    with engine.serving():
        yield engine


LISTING, OWN = "ls -l; ls -l *; pwd", "cat answer.txt"


def test_a_stored_rollout_goes_on_in_a_new_sandbox_with_the_files_that_its_commands_left(tmp_path: Path) -> None:
    """Listings, which policies ask for first, show the owner and the time of files that every sandbox has anew."""

    def script(messages: list[dict[str, Any]], seed: int) -> Any:
        turn = turns_of(messages)
        if turn == 1:
            return calls(("write", {"path": "answer.txt", "content": str(seed)}))
        commands = {0: LISTING, 2: OWN}
        return calls(("run", {"command": commands[turn]})) if turn in commands else says("Done.")

    with engine_of(script) as engine:
        settings = {
            "run_id": "r",
            "store": str(tmp_path),
            "environment": {"kind": "terminal", "problems": 10},
            "train": {"minibatches": 1},
        }
        limits = {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 8, "max_tokens": 100_000}
        run = open_run(parse_config(settings | {"rollout": limits}))
        weights = run.begin(run.stage(1, "refit"), policy_version=0).commit()
        stored = read_rollouts(collect_iteration(run, 1, weights, engine.url))
        branches = [branch(run, 1, [each.rollout_id for each in stored], 1, "b", engine.url, weights, samples=2)]
        branches += [branch(run, 1, [each.rollout_id for each in stored], 3, "c", engine.url, weights, samples=1)]
        delete_run(run)
        again = open_run(run.config)
        collect_iteration(again, 1, weights, engine.url)
        with pytest.raises(
            StoreError, match=r"was made of .*collect \(.*\), not of .*Give these branches another --name"
        ):
            branch(again, 1, [each.rollout_id for each in stored], 1, "b", engine.url, weights, samples=2)
    assert [each.reasons for each in branches] == [{}, {}]
    written, read = [], []
    for made in read_rollouts(branches[0].version):
        written += [item["arguments"] for item in made.items if item.get("name") == "write"]
        read += [item["output"] for item in made.items if item.get("type") == "function_call_output"][-1:]
    assert len(set(read)) == len(read) == 4, "each branch has a seed, and a sandbox, of its own"
    assert all(number in arguments for number, arguments in zip(read, written, strict=True))
