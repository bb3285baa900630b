"""The side of verifiers, in its own interpreter: `python -P worker.py CONFIG SOCKET`, or `… CONFIG --list FILE`.

Invariant: it imports verifiers and the standard library, and nothing of Roundhouse. The model calls of an episode go to the
base URL of its request. A closed connection cancels its episode.

CONFIG is a file with {"env": {…}, "tasks": 20}. `--list` writes the tasks as JSON. Otherwise a connection plays one episode:

    {"idx": 3, "hash": "…", "slot": 0, "base_url": "http://…/v1", "api_key": "…"}
    {"reward": 0.5, "components": {"lcs": 0.5}, "metrics": {}, "truncated": false}
    {"error": "TaskError: …", "kind": "task"}                                        kind: setup, row, seats, task or agent
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = "0.4."
"""Versions with the interface that this module uses."""
FINAL_ERRORS = ("TaskError", "EnvError", "ProviderError")
"""Errors of verifiers that another attempt would meet again."""


class Refused(Exception):
    """A failure with the kind of an answer."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def load(config: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the environment and its tasks.

    Raises:
        Refused: the package is missing or of another version, or it cannot load the environment.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise Refused("setup", "the package verifiers is not installed there") from None
    if not installed.startswith(VERSION):
        raise Refused("setup", f"verifiers {installed} is installed there, and {VERSION}x is needed")
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    try:
        block = vf.resolve_env_config(config["env"])
        local = {
            name: seat.model_copy(update={"runtime": vf.SubprocessConfig()})
            for name, seat in agent_config_fields(block).items()
            if "runtime" not in seat.model_fields_set
        }
        env = vf.load_environment(block.model_copy(update=local))
        taskset = env.taskset if config["tasks"] is None else env.taskset.take(config["tasks"])
        if not taskset.bounded:
            raise Refused("setup", "the task set is endless; set environment.tasks to the number of tasks to read")
        return env, list(taskset)
    except Refused:
        raise
    except Exception as error:
        raise Refused("setup", f"{type(error).__name__}: {error}") from error


def listed(config: dict[str, Any]) -> dict[str, Any]:
    """Return the tasks for their rows."""
    _, tasks = load(config)
    return {
        "tasks": [
            {
                "idx": each.data.idx,
                "hash": each.hash,
                "system": each.data.system_prompt,
                "prompt": each.data.prompt_text,
            }
            for each in tasks
        ]
    }


async def play(env: Any, tasks: list[Any], request: dict[str, Any]) -> dict[str, Any]:
    """Play one episode and return its answer.

    Raises:
        Refused: the episode failed, or the policy played several agents.
    """
    import verifiers.v1 as vf

    index, base_url = request["idx"], request["base_url"]
    if index >= len(tasks) or tasks[index].hash != request["hash"]:
        raise Refused("row", f"task {index} of the task set is another one than that of the row")
    variable = (
        f"ROUNDHOUSE_API_KEY_{request['slot']}"  # verifiers hides names with API_KEY from the programs that it starts
    )
    os.environ[variable] = request["api_key"]
    context = vf.ModelContext(client=vf.EvalClientConfig(base_url=base_url, api_key_var=variable), model="policy")
    [slot] = env.slots(tasks[index])
    episode = await env.run_slot(slot, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        texts = [f"{error.type}: {error.message}" for error in errors] or ["the episode failed without an error"]
        raise Refused("task" if errors and errors[-1].type in FINAL_ERRORS else "agent", texts[-1])
    own = [trace for trace in episode.traces if getattr(trace.agent.config.client, "base_url", None) == base_url]
    if len(own) != 1:
        names = ", ".join(trace.agent.name for trace in own)
        raise Refused("seats", f"the policy played {len(own)} agents of the episode ({names})")
    [trace] = own
    return {
        "reward": trace.reward,
        "components": {name: each.value for name, each in trace.rewards.items() if each is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "truncated": trace.is_truncated,
    }


async def answer(work: Any) -> dict[str, Any]:
    """Return the result of work, or its failure as an answer."""
    try:
        return await work
    except Refused as error:
        return {"error": str(error), "kind": error.kind}
    except Exception as error:  # noqa: BLE001 - the failure of an episode is its answer
        return {"error": f"{type(error).__name__}: {error}", "kind": "agent"}


async def serve(config: dict[str, Any], socket: str) -> None:
    """Serve until the process is ended."""
    env, tasks = load(config)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if line := await reader.readline():
            work = asyncio.create_task(answer(play(env, tasks, json.loads(line))))
            closed = asyncio.create_task(reader.read(1))
            await asyncio.wait({work, closed}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                writer.write(json.dumps(work.result()).encode() + b"\n")
                with suppress(OSError):
                    await writer.drain()
            work.cancel()
            closed.cancel()
        writer.close()

    async with env.serving(), await asyncio.start_unix_server(connected, socket) as server:
        await server.serve_forever()


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    if sys.argv[2] == "--list":
        try:
            rows = listed(settings)
        except Refused as error:
            rows = {"error": str(error)}
        Path(sys.argv[3]).write_text(json.dumps(rows))
    else:
        asyncio.run(serve(settings, sys.argv[2]))
