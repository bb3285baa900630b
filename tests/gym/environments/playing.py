"""Manual play of environments, shared by the tests of this directory."""

import json
import random
from typing import Any

from roundhouse import plugins
from roundhouse.config.sandboxes import LocalSandbox, SandboxLimits
from roundhouse.environments.base import Environment, Rewarded, Split, TaskRow, Verdict
from roundhouse.environments.generated import GeneratedEnvironment

SPLITS: tuple[Split, Split] = ("train", "heldout")
IMAGE = "localhost/roundhouse-sandbox-test:1"
LIMITS: dict[str, Any] = {"command_seconds": 10, "processes": 20, "disk_mib": 8, "output_bytes": 1000}
SANDBOXES: dict[str, SandboxLimits] = {"local": LocalSandbox(memory_mib=256, **LIMITS)}
"""Sections with small limits, by kind."""
if "container" in plugins.names("sandbox"):
    SANDBOXES["container"] = plugins.section("sandbox", "container")(
        kind="container", image=IMAGE, memory_mib=64, **LIMITS
    )


def message(text: str) -> dict[str, Any]:
    """A final assistant message as a Responses item."""
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def tool_call(name: str = "calculate") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": "{}", "call_id": "call_1"}


async def judge(environment: Environment, row: TaskRow, *output: dict[str, Any]) -> Verdict:
    """Verdict on a rollout that used no tool and left `output`."""
    return await environment.verify(await environment.seed_session(row), row, {"output": list(output)})


async def replay(environment: Environment, row: TaskRow, conversation: list[dict[str, Any]]) -> Verdict:
    """Play a demonstration's tool calls on a real session, check each shown result, and judge it."""
    session = await environment.seed_session(row)
    output: list[dict[str, Any]] = []
    for said, answered in zip(conversation[1:], [*conversation[2:], None], strict=True):
        for call in said.get("tool_calls", []):
            tool = environment.tools()[call["function"]["name"]]
            result = await tool.call(session, **json.loads(call["function"]["arguments"]))
            text = result.answer if isinstance(result, Rewarded) else result
            assert answered == {"role": "tool", "tool_call_id": call["id"], "content": text}
        if said["role"] == "assistant" and said["content"]:
            output.append(message(said["content"]))
    return await environment.verify(session, row, {"output": output})


async def rewards_of(environment: GeneratedEnvironment[Any], right: bool, count: int) -> list[float]:
    """Rewards of demonstrations, replayed with the real tools, on problems of both splits."""
    rng = random.Random(11)
    rewards = []
    for split in SPLITS:
        for problem in environment.problems[split][: count // 2]:
            row = json.loads(json.dumps(environment.row(problem)))
            prompt = row["responses_create_params"]["input"][0]
            shown = [prompt, *environment.demonstration(problem, right, rng)]
            rewards.append((await replay(environment, row, shown)).reward)
    return rewards


def prompt_of(row: TaskRow) -> str:
    return row["responses_create_params"]["input"][0]["content"]
