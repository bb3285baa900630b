"""Sockets of a process with thousands of calls in flight.

Invariant: nothing here bounds how many calls are in flight; `rollout.concurrency` does.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import aiohttp

OPENING_AT_ONCE = 128


def allow_open_files() -> None:
    """Raise the soft limit to the hard one: each model call in flight is a socket, and the usual soft limit of 1024 would bound
    `rollout.concurrency` by errors that name the engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class PacedConnector(aiohttp.TCPConnector):
    """Opens few connections at once. Thousands of rollouts that begin together would overflow the server's queue of
    connections to accept (2048 with uvicorn), and those that are dropped there run into their time limit. Waiting here is
    not part of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(limit=0, **options)
        self._opening = asyncio.Semaphore(OPENING_AT_ONCE)

    async def _create_connection(self, *arguments: Any, **options: Any) -> Any:
        async with self._opening:
            return await super()._create_connection(*arguments, **options)
