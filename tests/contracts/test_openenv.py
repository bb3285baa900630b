"""OpenEnv's own package: three environments that its server plays, whose rewards its own client receives equally."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.environments import load_any
from roundhouse.errors import ConfigError
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.protocol import EnvironmentUnavailable, EnvironmentUnreachable, StepFailed
from roundhouse.trajectories.records import Status
from tests.gym.collecting import collect
from tests.gym.playground import SAMPLING, ScriptedPolicy, calls, rollout_config, says

pytestmark = [pytest.mark.contract("openenv-0.10.0"), pytest.mark.timeout(600)]
PEER = Path(__file__).parent / "openenv_peer.py"
SEEDS = 12


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Any]]:
    """The servers, started by the first test; an empty mapping until then."""
    state: dict[str, Any] = {}
    yield state
    if state:
        state["process"].stdin.close()
        state["process"].wait(30)


@pytest.fixture
def urls(foreign_python: Path, served: dict[str, Any]) -> dict[str, str]:
    if not served:
        command = [str(foreign_python), str(PEER), "serve"]
        served["process"] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        served["urls"] = json.loads(served["process"].stdout.readline())
    return served["urls"]


def made(url: str, **keys: Any) -> Any:
    tree = {"kind": "openenv", "url": url, "train": SEEDS, "heldout": 1, **keys}
    return load_any(parse_config({"run_id": "r", "environment": tree}).environment)


def reply(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"output": [{"type": "message", "role": "assistant", "content": content}]}


def tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": json.dumps(arguments)}


def actions_of(name: str, generator: random.Random) -> list[dict[str, Any]]:
    if name == "template":
        return [{"message": "a" * generator.randrange(14)} for _ in range(4)]
    if name == "numbers":
        return [{"number": generator.choice([*range(13), *range(14, 21)])} for _ in range(4)]
    tools = [("put", {"thing": "cup"}), ("look", {}), ("put", {"thing": ""})]
    drawn = [generator.choice(tools) for _ in range(5)]
    return [{"type": "call_tool", "tool_name": tool, "arguments": arguments} for tool, arguments in drawn]


KEYS: dict[str, dict[str, Any]] = {
    "template": {"action": "message", "observation": "echoed_message"},
    "numbers": {"observation": "text"},
    "shelf": {"tools": True},
}


def as_response(name: str, action: dict[str, Any]) -> dict[str, Any]:
    if name == "shelf":
        return {"output": [tool_call(action["tool_name"], **action["arguments"])]}
    return reply(action["message"] if name == "template" else f"I choose {json.dumps(action)}.")


def played(python: Path, urls: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    command = [str(python), str(PEER), "play", json.dumps(urls), json.dumps(cases)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


async def test_the_same_actions_earn_what_its_own_client_receives(foreign_python: Path, urls: dict[str, str]) -> None:
    cases = {
        name: [{"seed": seed, "actions": actions_of(name, random.Random(seed))} for seed in range(SEEDS)]
        for name in KEYS
    }
    theirs, compared, ended = played(foreign_python, urls, cases), 0, 0
    for name, episodes in cases.items():
        environment = made(urls[name], **KEYS[name])
        for row, episode, other in zip(environment.tasks("train"), episodes, theirs[name], strict=True):
            state, _ = await environment.reset(row)
            for action, result in zip(episode["actions"], other["results"], strict=False):
                step = await environment.step(state, as_response(name, action))
                assert (step.reward, step.terminated) == (result["reward"] or 0.0, result["done"]), (name, row, action)
                compared += 1
                ended += step.terminated
            await environment.close(state)
    assert compared >= 100
    assert ended >= SEEDS


async def test_a_rollout_shows_observations_and_answers_tool_calls(urls: dict[str, str]) -> None:
    opened = open_environment(
        parse_config(
            {
                "run_id": "r",
                "environment": {"kind": "openenv", "url": urls["shelf"], "tools": True, "prompt": "Fill it."},
            }
        ).environment
    )
    async with opened as environment:
        [row, *_] = environment.tasks("train")
        assert [each["name"] for each in row["responses_create_params"]["tools"]] == ["put", "look"]
        script = lambda messages, seed: calls(("put", {"thing": "cup"}), ("look", {}), ("put", {"what": 1}))  # noqa: E731
        specs = plan_rollouts([row], 2, seed=3, iteration=1)
        rollouts = await collect(
            specs, ScriptedPolicy(script), environment, rollout_config(timeout_seconds=60), SAMPLING
        )
    for rollout in rollouts:
        assert (rollout.status, rollout.reward) == (Status.COMPLETED, 0.75), rollout.failure_detail
        outputs = [item["output"] for item in rollout.items if item["type"] == "function_call_output"]
        assert outputs[:2] == ["1 things", '["cup"]']
        assert "what" in outputs[2]


async def test_an_invalid_action_is_answered_and_is_no_step(urls: dict[str, str]) -> None:
    environment = made(urls["numbers"], observation="text", reset={"low": 20})
    state, observation = await environment.reset(environment.tasks("train")[0])
    assert observation == "Find my number from 20 to 20."
    for text, problem in (
        ("ten", "a JSON object"),
        ('{"number": 99}', "less than or equal to 20"),
        ('{"n": 1}', "number"),
    ):
        step = await environment.step(state, reply(text))
        assert (step.reward, step.done) == (0.0, False)
        assert problem in step.observation
    step = await environment.step(state, reply('{"number": 20}'))
    assert (step.reward, step.terminated, step.observation) == (1.0, True, None)
    await environment.close(state)


async def test_failures_of_server_and_environment_are_told_apart(urls: dict[str, str]) -> None:
    environment = made(urls["numbers"], observation="text")
    state, _ = await environment.reset(environment.tasks("train")[0])
    with pytest.raises(StepFailed, match="13 is unhappy"):
        await environment.step(state, reply('{"number": 13}'))
    await environment.close(state)
    single = made(urls["single"])
    state, _ = await single.reset(single.tasks("train")[0])
    with pytest.raises(EnvironmentUnavailable, match="CAPACITY_REACHED"):
        await single.reset(single.tasks("train")[1])
    await single.close(state)
    gone = made("http://127.0.0.1:9")
    with pytest.raises(EnvironmentUnreachable, match=r"No OpenEnv server accepts a session at http://127\.0\.0\.1:9"):
        await gone.reset(gone.tasks("train")[0])


async def test_a_game_without_tools_runs_as_a_rollout_to_its_end(urls: dict[str, str]) -> None:
    tree = {"kind": "openenv", "url": urls["numbers"], "observation": "text", "reset": {"low": 20}}
    async with open_environment(parse_config({"run_id": "r", "environment": tree}).environment) as environment:
        specs = plan_rollouts(environment.tasks("train")[:3], 1, seed=3, iteration=1)
        policy = ScriptedPolicy(lambda messages, seed: says('{"number": 20}'))
        rollouts = await collect(specs, policy, environment, rollout_config(timeout_seconds=60), SAMPLING)
    assert [(each.status, each.reward) for each in rollouts] == [(Status.COMPLETED, 1.0)] * 3


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"tools": True, "action": "message"}, "environment.tools is true and environment.action is set"),
        ({"tools": True}, "environment.tools is true, but the tools cannot be listed: No OpenEnv server"),
    ],
)
def test_keys_that_cannot_work_are_refused_with_the_remedy(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        made("http://127.0.0.1:9", **keys)
    assert text in str(error.value)
