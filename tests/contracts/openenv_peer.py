"""A server of OpenEnv with three environments, and its own client: `python openenv_peer.py serve` and `… play URLS ACTIONS`.

`serve` prints the URL of each environment as JSON and serves until its input ends. `play` plays the actions of each environment
and seed with the package's GenericEnvClient and prints observations, rewards, ends and errors as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation, ListToolsObservation
from pydantic import Field

TYPED = {"call_tool": CallToolObservation, "list_tools": ListToolsObservation}


class Guess(Action):
    number: int = Field(ge=0, le=20)


class Hint(Observation):
    text: str


class Numbers(Environment):
    """Find a number that the seed draws; an unhappy number raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="none", step_count=0)
        self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, low: int = 0, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(low, 20)
        self._state = State(episode_id=episode_id or "none", step_count=0)
        return Hint(text=f"Find my number from {low} to 20.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        if action.number == 13:
            raise ValueError("13 is unhappy")
        if action.number == self.number:
            return Hint(text="Found.", reward=1.0, done=True)
        closeness = 1 - abs(action.number - self.number) / 20
        text = "higher" if action.number < self.number else "lower"
        return Hint(text=text, reward=closeness / 10, done=self._state.step_count >= 4)

    @property
    def state(self) -> State:
        return self._state


class Shelf(MCPEnvironment):
    """Put three things on a shelf by tools; each step that leaves more there earns a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("shelf")
        self.things: list[str] = []

        @tools.tool
        def put(thing: str) -> str:
            """Put a thing on the shelf."""
            self.things.append(thing)
            return f"{len(self.things)} things"

        @tools.tool
        def look() -> list[str]:
            """Look at the shelf."""
            return self.things

        super().__init__(tools)
        self._state = State(episode_id="none", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.things.clear()
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools")

    def step(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return self._judged(len(self.things), super().step(action))

    async def step_async(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        before = len(self.things)
        return self._judged(before, await super().step_async(action))

    def _judged(self, before: int, observation: Observation) -> Observation:
        observation.reward = 0.25 * (len(self.things) - before)
        observation.done = len(self.things) >= 3
        return observation

    @property
    def state(self) -> State:
        return self._state


def template(folder: Path) -> Any:
    """The environment that the package's own command begins one with."""
    command = [sys.executable, "-m", "openenv.cli", "init", "echo_world"]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    sys.path.insert(0, str(folder))
    from echo_world.models import EchoWorldAction, EchoWorldObservation
    from echo_world.server.echo_world_environment import EchoWorldEnvironment

    return create_fastapi_app(EchoWorldEnvironment, EchoWorldAction, EchoWorldObservation, max_concurrent_envs=8)


def serve() -> None:
    with tempfile.TemporaryDirectory() as folder:
        apps = {
            "template": template(Path(folder)),
            "numbers": create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=8),
            "shelf": create_fastapi_app(Shelf, CallToolAction, CallToolObservation, max_concurrent_envs=8),
            "single": create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=1),
        }
        urls = {}
        for name, app in apps.items():
            listener = socket.create_server(("127.0.0.1", 0))
            urls[name] = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
        print(json.dumps(urls), flush=True)
        sys.stdin.read()


async def play(urls: dict[str, str], cases: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    played: dict[str, list[dict[str, Any]]] = {}
    for name, episodes in cases.items():
        for episode in episodes:
            client = GenericEnvClient(base_url=urls[name])
            await client.reset(seed=episode["seed"])
            results = []
            for action in episode["actions"]:
                try:
                    result = await client.step(action)
                except RuntimeError as error:
                    results.append({"error": str(error)})
                    continue
                if kind := TYPED.get(action.get("type")):
                    kind.model_validate(result.observation)
                results.append({"reward": result.reward, "done": result.done, "observation": result.observation})
                if result.done:
                    break
            await client.close()
            played.setdefault(name, []).append({"results": results})
    return played


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(asyncio.run(play(json.loads(sys.argv[2]), json.loads(sys.argv[3])))))
