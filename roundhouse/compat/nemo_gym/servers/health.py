"""Whether a server answers.

Invariant: any HTTP answer counts, whatever its status: foreign servers need not have a route at `/`. What does not answer has a
name for how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp

from roundhouse.compat.nemo_gym.servers.head import ServerStatus

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
