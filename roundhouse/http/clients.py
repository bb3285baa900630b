"""The HTTP clients of this package: how they read replies, and how they meet the proxy variables of the environment.

Invariant: each client has the limit of `roundhouse.http.replies` on the size of a reply. With httpx the limit is in the client,
with aiohttp in `read_reply`:

    with http_client(url) as http:
        data = http.get("/v1/models").content
    async with client_session(…) as http, http.post(url, data=data) as reply:
        data = await read_reply(reply)

Invariant: no client keeps a cookie: a cookie that cannot be sent back would fail every later request. Code that needs
the cookies of a session sends them itself.

Invariant: no request to this machine goes through a proxy, and no internal request does (engine, replicas, trainer,
environment servers): a proxy would read its token. A request to a foreign server, such as `generation.endpoint.url`, follows
HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from roundhouse.http.asgi import is_loopback
from roundhouse.http.deadlines import AsyncTimedBackend, TimedBackend, limit_headers
from roundhouse.http.replies import IDENTITY, limit_hooks

if TYPE_CHECKING:
    import aiohttp
    import httpx


def http_client(url: str, *, foreign: bool = False, **options: Any) -> httpx.Client:
    """Return a client of the server at a URL; options as of `httpx.Client`.

    Args:
        url: the base of relative URLs.
        foreign: the server is not a part of the run.
    """
    import httpx

    client = httpx.Client(**_options(url, foreign, options, limit_hooks(httpx)[0]))
    limit_headers(client, TimedBackend)
    return client


def async_http_client(httpx: ModuleType, url: str, *, foreign: bool = False, **options: Any) -> Any:
    """Return an `AsyncClient` of the module `httpx`, or of one with its interface; arguments as of `http_client`."""
    client = httpx.AsyncClient(**_options(url, foreign, options, limit_hooks(httpx)[1]))
    limit_headers(client, AsyncTimedBackend)
    return client


def client_session(headers: Mapping[str, str] | None = None, **options: Any) -> aiohttp.ClientSession:
    """Return a session for `read_reply`; options as of `aiohttp.ClientSession`."""
    import aiohttp

    return aiohttp.ClientSession(
        headers=IDENTITY | dict(headers or {}), auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), **options
    )


def _options(url: str, foreign: bool, options: Mapping[str, Any], limit: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        "base_url": url.rstrip("/"),
        "trust_env": foreign and not is_on_this_machine(url),
        "verify": options["verify"] if "verify" in options else _certificates(url),
        **options,
        "headers": IDENTITY | dict(options.get("headers") or {}),
        "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        "event_hooks": {"response": [limit]},
    }


def _certificates(url: str) -> ssl.SSLContext | bool:
    """Return the authorities' certificates; reading them costs 30 ms of CPU, and plain HTTP needs none."""
    import httpx

    return httpx.create_ssl_context() if url.startswith("https://") else False


def is_on_this_machine(url: str) -> bool:
    """Return whether the URL names a loopback address."""
    return is_loopback(urlsplit(url).hostname or "")


def proxy_note(url: str) -> str:
    """Return a sentence that names the variable by which requests to a foreign server go through a proxy; else nothing."""
    parts = urlsplit(url)
    if is_on_this_machine(url) or proxy_bypass(parts.netloc):
        return ""
    proxies = getproxies_environment()
    if (scheme := next((each for each in (parts.scheme, "all") if each in proxies), None)) is None:
        return ""
    name = f"{scheme}_proxy"
    variable = next((each for each in (name, name.upper()) if os.environ.get(each)), name)
    return f" {variable} sends the request through a proxy. If that is wrong, add {parts.hostname} to NO_PROXY."
