"""The servers that have to answer before a run with an environment by URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from roundhouse.config.environments import ServerAddress
from roundhouse.config.secrets import read_secret
from roundhouse.errors import RoundhouseError
from roundhouse.plugins.nemo_gym.clients.connection import Connection, look_up
from roundhouse.plugins.nemo_gym.section import AgentEnvironment, RemoteEnvironment

LOOK_UP_SECONDS = 2.0


def of_resources_server(environment: RemoteEnvironment, key: str) -> Iterator[ServerAddress]:
    """Yield the address of the resources server."""
    yield ServerAddress("environment", environment.url, f"Start the resources server, or correct {key}.url.")


def of_agent_server(environment: AgentEnvironment, key: str) -> Iterator[ServerAddress]:
    """Yield the agent server, looked up if its URL is not given, and the model server that supplies the records."""
    if environment.url is not None:
        yield ServerAddress("environment", environment.url, f"Start the agent server, or correct {key}.url.")
    else:
        remedy = f"Start the head server and the agent, or correct {key}.head_server and {key}.agent."
        try:
            url = asyncio.run(_look_up(environment))
        except (RoundhouseError, TimeoutError) as error:
            yield ServerAddress("environment", "", remedy, str(error) or f"{environment.head_server}: no answer")
        else:
            yield ServerAddress("environment", url, f"Start the agent server {environment.agent}.")
    if environment.tokens == "captured" and environment.model_server is not None:
        remedy = f"Start the model server and its engines, or correct {key}.model_server."
        yield ServerAddress("model server", f"{environment.model_server.rstrip('/')}/health", remedy)


async def _look_up(environment: AgentEnvironment) -> str:
    assert environment.head_server is not None
    assert environment.agent is not None
    head = Connection(environment.head_server, key="environment.head_server")
    try:
        async with asyncio.timeout(LOOK_UP_SECONDS):
            token = read_secret(environment.head_token_variable or "", environment.head_token_file)
            return await look_up(head, environment.agent, token)
    finally:
        await head.close()
