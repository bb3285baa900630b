"""Environments of Roundhouse, played by OpenEnv's own client, with the rewards that they give in process."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundhouse.environments import environment_config, load_to_serve
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from tests.contracts.test_openenv import played
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, Reply, ScriptedPolicy, by_turn, calls, rollout_config, says
from tests.plugins.openenv.test_server import serving

pytestmark = [pytest.mark.contract("openenv-0.10.0"), pytest.mark.timeout(600)]
SEEDS = 25
KINDS = ("calculator", "guess_number", "sort", "frozen_lake")


@pytest.fixture
def urls() -> Iterator[dict[str, str]]:
    with serving(*KINDS) as urls:
        yield urls


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def actions_of(kind: str, row: dict[str, Any], generator: random.Random) -> list[dict[str, Any]]:
    """Draw actions of an episode: right, wrong, malformed and empty ones."""
    if kind == "frozen_lake":
        moves = ["up", "down", "left", "right", "I go right.", "", "fly", "↓"]
        return [{"text": generator.choice(moves)} for _ in range(8)]
    right = f"The answer is {row['answer']}." if kind == "calculator" else str(row.get("answer", "Done."))
    final = {"text": generator.choice([right, f"So: {right}", "7", "", "<think>hm</think> 9", "数 12", "]" * 99])}
    if kind == "sort":
        return [final]
    if kind == "calculator":
        expression = re.search(r"What is (\d+.\d+)", row["responses_create_params"]["input"][0]["content"])
        calculations = [call("calculate", expression=each) for each in (expression[1] if expression else "1+1", "1//0")]
        drawn = [*calculations, call("calculate", wrong=1), call("compute", expression="1+1")]
        return [*generator.sample(drawn, generator.randrange(4)), final]
    return [*[call("guess", number=generator.randrange(9)) for _ in range(generator.randrange(5))], final]


def as_reply(action: dict[str, Any]) -> Reply:
    return says(action["text"]) if "text" in action else calls((action["tool_name"], action["arguments"]))


async def test_its_client_earns_the_rewards_of_rollouts_in_process(foreign_python: Path, urls: dict[str, str]) -> None:
    configs = {kind: environment_config(kind) for kind in KINDS}
    rows = {kind: load_to_serve(configs[kind]).tasks("train")[:SEEDS] for kind in KINDS}
    cases = {
        kind: [
            {"seed": seed, "actions": actions_of(kind, row, random.Random(seed))} for seed, row in enumerate(rows[kind])
        ]
        for kind in KINDS
    }
    theirs, rewards = played(foreign_python, urls, cases), set[float]()
    for kind in KINDS:
        async with open_environment(configs[kind]) as environment:
            for row, case, episode in zip(rows[kind], cases[kind], theirs[kind], strict=True):
                settings = rollout_config(max_turns=len(case["actions"]))
                policy = ScriptedPolicy(by_turn(*map(as_reply, case["actions"])))
                [ours] = await collect(plan_rollouts([row], 1, 3, 1), policy, environment, settings, SAMPLING)
                assert ours.reward == sum(each["reward"] for each in episode["results"]), (kind, case, ours, episode)
                outputs = [item["output"] for item in ours.items if item["type"] == "function_call_output"]
                seen = [each["observation"] for each in episode["results"] if "tool_name" in each["observation"]]
                assert outputs == [each.get("result") or each["error"]["message"] for each in seen]
                assert kind == "frozen_lake" or episode["results"][-1]["done"]
                rewards.add(ours.reward)
    assert rewards == {0.0, 1.0}


def test_its_client_receives_errors_and_the_list_of_tools(foreign_python: Path, urls: dict[str, str]) -> None:
    actions = [
        {"type": "list_tools"},
        {"number": 1},
        {"type": "call_tool", "tool_name": 3},
        call("compute"),
        call("calculate"),
        {"text": "1"},
    ]
    case = {"calculator": [{"seed": 0, "actions": actions}]}
    results = played(foreign_python, urls, case)["calculator"][0]["results"]
    assert [each["name"] for each in results[0]["observation"]["tools"]] == ["calculate"]
    assert [each["error"] for each in results[1:3]] == ["Server error: Invalid message (code: VALIDATION_ERROR)"] * 2
    kinds = [each["observation"]["error"]["error_type"] for each in results[3:5]]
    assert (kinds, results[5]["done"]) == (["tool_not_found", "invalid_args"], True)
    assert json.dumps(results).count("No episode") == 0
