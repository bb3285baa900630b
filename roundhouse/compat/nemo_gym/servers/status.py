"""Which servers a head server knows, and whether each answers.

Invariant: the answer comes from the servers themselves, asked at this moment; what the head server last saw is not repeated.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from roundhouse.compat.nemo_gym.clients.connection import Connection
from roundhouse.compat.nemo_gym.servers.health import check_all
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
