"""No web page of another site reads or changes anything through a server of ours: ASGI middleware in front of each of them.

Invariant: a request that a browser makes for a page is answered only where this server itself served that page. A browser
sends any site's requests to the loopback interface as well, simple ones without asking first, so that listening there is no
border against a page that its user has open.

    Host                     a name of another site that points here (DNS rebinding): 421
    Origin, Sec-Fetch-Site   a page of another site or of another port: 403, for a websocket too

A link that a person follows (GET, into a tab of its own) is answered wherever it stood. Programs send neither `Origin` nor
`Sec-Fetch-Site` and pass.

A server on the loopback interface answers to the names of that interface, and to those that ROUNDHOUSE_ALLOWED_HOSTS lists (by
commas), such as that of a reverse proxy. A server that listens beyond it cannot know its names, of a Service say: it answers to
any, or, where the variable is set, to those listed and to addresses, which nobody can rebind.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection
from typing import Any

from roundhouse.http.asgi import Application
from roundhouse.http.body_limit import refuse

VARIABLE = "ROUNDHOUSE_ALLOWED_HOSTS"


class SameOrigin:
    """An ASGI application that only its own pages and programs reach."""

    def __init__(self, app: Application, host: str, names: Collection[str] = ()) -> None:
        """
        Args:
            host: the address or name that the server listens on.
            names: more that it answers to.
        """
        self._app = app
        self._is_local = is_loopback(host)
        self._listed = {name.strip().lower() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
        self._names = frozenset(names)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, *refusal)
        else:
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the server answers 403

    def _refusal(self, scope: Any) -> tuple[int, str, str] | None:
        """Status, code and text."""
        hosts, origins, headers = set[str](), set[str](), dict[bytes, bytes]()
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.add(value.decode("latin-1").lower())
            elif name == b"origin":
                origins.add(value.decode("latin-1").lower().partition("://")[2])
            elif name.startswith(b"sec-fetch-"):
                headers[name] = value
        if unknown := [host for host in hosts if not self._answers_to(host_name(host))]:
            text = f"This server does not answer to the name {unknown[0]!r}. Use its address, or list the name in {VARIABLE}."
            return 421, "foreign_host", text
        is_foreign = not origins <= hosts or headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none")
        if is_foreign and not _is_followed_link(scope, headers):
            return 403, "foreign_origin", "A page of another site may not use this server."
        return None

    def _answers_to(self, name: str) -> bool:
        if name in self._names or name in self._listed or (self._is_local and is_loopback(name)):
            return True
        return not self._is_local and (not self._listed or _is_address(name) or name == "localhost")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def host_name(host: str) -> str:
    """A `Host` without the port, and an IPv6 address without its brackets."""
    name, _, port = host.rpartition(":")
    name = name if name and port.isdecimal() else host
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_followed_link(scope: Any, headers: dict[bytes, bytes]) -> bool:
    """Into a tab of its own: nothing of it can be read where the link stood, and a GET changes nothing."""
    is_new_page = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document")
    return is_new_page and scope.get("method") == "GET"
