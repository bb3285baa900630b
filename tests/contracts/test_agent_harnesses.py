"""The programs of `examples/agents` with the SDKs that they use: each call is recorded, proved and judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.models import ValidationConfig
from roundhouse.environments.base import TaskRow
from roundhouse.plugins.programs.command import CommandClient
from roundhouse.plugins.programs.section import CommandEnvironment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Status
from roundhouse.trajectories.validation import validate
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, Reply, ScriptedPolicy, calls, rollout_config, says, turns_of

pytestmark = pytest.mark.timeout(600)
AGENTS = Path(__file__).parents[2] / "examples" / "agents"
ROW: TaskRow = {
    "task_id": "t",
    "question": "What is 12*8?",
    "answer": "96",
    "responses_create_params": {"input": "What is 12*8?"},
}
SAMPLES, TURNS = 2, 3
BYTES, VERSION = 256, 3
"""Vocabulary and version of the scripted policy."""


def calls_tools(messages: list[dict[str, Any]], seed: int) -> Reply:
    """Two calls at once, then one, then the answer. Each call has its own id, as those of an engine."""
    turn = turns_of(messages)
    first = calls(("multiply", {"a": seed % 1000, "b": 1}), ("multiply", {"a": 12, "b": 4}))
    reply = [first, calls(("multiply", {"a": 12, "b": 8})), says("96")][turn]
    for call in reply.get("tool_calls") or []:
        call["id"] += f"_{turn}"
    return reply


def writes_code(messages: list[dict[str, Any]], seed: int) -> Reply:
    first = f"I multiply.\n<code>\nprint(multiply({seed % 1000}, 1))\n</code>"
    second = "<code>\nresult = multiply(12, 8)\nprint(result)\n</code>"
    return [says(first), says(second), says("<code>\nfinal_answer(result)\n</code>")][turns_of(messages)]


def runs_commands(messages: list[dict[str, Any]], seed: int) -> Reply:
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo $((12*8))"
    commands = [f"echo {seed % 1000}", "echo $((12*8))", end]
    return calls(("bash", {"command": commands[turns_of(messages)]}))


HARNESSES = [
    ("openai-agents-0.24.0", ["openai_agents.py", "responses"], calls_tools, "multiply"),
    ("openai-agents-0.24.0", ["openai_agents.py", "chat_completions"], calls_tools, "multiply"),
    ("langgraph-1.2.24", ["langgraph_agent.py"], calls_tools, "multiply"),
    ("smolagents-1.26.0", ["smolagents_code.py"], writes_code, "multiply"),
    ("mini-swe-agent-2.4.6", ["mini_swe_agent.py"], runs_commands, "bash"),
    ("anthropic-2.14.0", ["anthropic_loop.py"], calls_tools, "multiply"),
]


@pytest.mark.parametrize(
    ("words", "script", "tool"),
    [pytest.param(*rest, marks=pytest.mark.contract(package), id="-".join(rest[0])) for package, *rest in HARNESSES],
)
async def test_a_harness_is_recorded_proved_and_judged(
    foreign_python: Path, words: list[str], script: Callable[..., Reply], tool: str
) -> None:
    section = CommandEnvironment(
        kind="command",
        command=(str(foreign_python), str(AGENTS / words[0]), *words[1:]),
        verifier=f"{AGENTS / 'judge.py'}:judge",
    )
    specs = plan_rollouts([ROW], SAMPLES, seed=3, iteration=1)
    async with CommandClient(section) as environment:
        config = rollout_config(timeout_seconds=250, concurrency=1)
        rollouts = await collect(specs, ScriptedPolicy(script), environment, config, SAMPLING)
    for rollout in rollouts:
        assert (rollout.status, rollout.reward) == (Status.COMPLETED, 1.0), rollout.failure_detail
        assert [turn.parent for turn in rollout.turns] == [None, 0, 1], (
            "each prompt continues the tokens of the last call"
        )
        assert tool in bytes(rollout.turns[0].generation_token_ids).decode()
    validated = validate(rollouts, ValidationConfig(), vocabulary_size=BYTES, policy_version=VERSION)
    assert (validated.reasons, validated.breaks, validated.forks) == ({}, {}, {})
    assert validated.sequences.num_rows == SAMPLES
