"""Which servers a head server knows, and whether each answers.

Invariant: the answer comes from the servers themselves, asked at this moment; what the head server last saw is not repeated.

Whether a server answers.

Invariant: any HTTP answer counts, whatever its status: foreign servers need not have a route at `/`. What does not answer has a
name for how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import aiohttp
import orjson

from roundhouse.compat.nemo_gym.clients.connection import Connection
from roundhouse.compat.nemo_gym.servers.head import ServerStatus
from roundhouse.errors import InfraError

HEAD_SECONDS = 5.0
SERVER_SECONDS = 2.0


def server_statuses(head_url: str) -> list[dict[str, Any]]:
    """The entries of /server_instances with a fresh `status`.

    Raises:
        ConfigError: `head_url` is none.
        InfraError: no head server answers there.
    """
    return asyncio.run(_statuses(head_url))


async def _statuses(head_url: str) -> list[dict[str, Any]]:
    head = Connection(head_url, HEAD_SECONDS, key="--head")
    try:
        status, text = await head.get("server_instances")
    finally:
        await head.close()
    try:
        servers = orjson.loads(text) if status == 200 else None
    except orjson.JSONDecodeError:
        servers = None
    if not isinstance(servers, list):
        raise InfraError(f"{head_url}/server_instances answered {status}: {text[:200]}. Is it a head server?")
    fresh = await check_all((str(one.get("url")) for one in servers), SERVER_SECONDS)
    return [{**one, "status": told} for one, told in zip(servers, fresh, strict=True)]


PROBE_SECONDS = 5.0


async def check(url: str, http: aiohttp.ClientSession, seconds: float = PROBE_SECONDS) -> ServerStatus:
    """One question."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=seconds), allow_redirects=False):
            return "success"
    except TimeoutError:
        return "timeout"
    except aiohttp.ClientConnectionError:
        return "connection_error"
    except (aiohttp.ClientError, ValueError):
        return "unknown_error"


async def check_all(urls: Iterable[str], seconds: float = PROBE_SECONDS) -> list[ServerStatus]:
    """All at once, in order."""
    async with aiohttp.ClientSession() as http:
        return list(await asyncio.gather(*(check(url, http, seconds) for url in urls)))
