"""The life of `roundhouse gym start`: start, wait, announce, watch, end.

Invariant: SIGINT and SIGTERM end it in order, also while it is still starting; a second one does not cut the ending short. It
ends normally when it was told to, and with an InfraError when a server ended by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from roundhouse.compat.nemo_gym.config.resolve import Resolution
from roundhouse.compat.nemo_gym.servers.commands import Command
from roundhouse.infra.gym_servers import GymServers, StartOptions


def run(
    resolution: Resolution, commands: Sequence[Command], options: StartOptions, ready: Callable[[dict[str, Any]], None]
) -> None:
    """Start the servers and keep them until a signal.

    Args:
        ready: told once, when every server has answered.

    Raises:
        InfraError: a server could not be started, did not answer in time, or ended by itself.
    """
    asyncio.run(_live(resolution, commands, options, ready))


async def _live(
    resolution: Resolution, commands: Sequence[Command], options: StartOptions, ready: Callable[[dict[str, Any]], None]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, stop.set)
    async with GymServers(resolution, commands, options) as servers:
        starting = asyncio.create_task(servers.start())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        else:
            starting.result()
            ready(_readiness(servers))
            await servers.until(stop)
        stopped.cancel()
        options.announce("ending the servers")


def _readiness(servers: GymServers) -> dict[str, Any]:
    return {
        "status": "ready",
        "head": servers.head_url,
        "pid": os.getpid(),
        "servers": [
            {"name": one.process_name, "type": one.server_type, "url": one.url, "pid": one.pid}
            for one in servers.running()
        ],
    }
