"""Prefect's server command, made to work with SQLite: `python -m roundhouse_flows._prefect.server server start …`.

Invariants: the thread of the server's event loop never blocks on a lock of the database. A request that SQLite refused
because of a faster transaction is repeated here. Pages of other sites cannot reach the server, because its API runs
commands.

The server uses its SQLite connections in threads. A connection that waits for the write lock (a minute at most) is
locked itself, and collecting garbage that belongs to it (an old cursor) blocks until the wait ends. Python collects
garbage in any allocating thread, mostly that of the event loop; if the request that holds the write lock needs the
event loop, everything stalls until the 60 s lock timeout. About a third of the cancelled runs met this.

Of two transactions that have read before they write, SQLite refuses one at once. Prefect then answers 503: its client
repeats the request, but its page does not, so a person's click on Resume or Cancel was lost.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from roundhouse.http.asgi import ClientGone, SameOrigin, read_body
from roundhouse.http.ports import LOOPBACK

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SIGN_IN = """<!doctype html><title>Prefect</title><body><script>
const kept = btoa(location.hash.slice(1));
fetch("/api/admin/version", {headers: {Authorization: `Basic ${kept}`}}).then((reply) => {
  if (!reply.ok) throw new Error();
  localStorage.setItem("prefect-password", kept);
  location.replace("/");
}).catch(() => { document.body.textContent = "This link is of another server: roundhouse up names the file to open."; });
</script>"""
"""Script that stores the password where Prefect's page reads it. Browsers do not send a fragment to a server."""
LOOK_SECONDS = 0.5
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.02, 0.2
AGAIN_SECONDS = 10.0
"""No request is made again later than this after it came."""
BUSY = 503
IN_PROCESS = "prefect-in-memory"
"""Host by which Prefect's automations, which send alerts, ask the server that they are part of. No name server has it."""


def collect_garbage_elsewhere() -> None:
    """Collect all garbage of this process in one thread, so that no other thread waits for its locks."""

    def collect() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            full = [count > limit for count, limit in zip(gc.get_count(), gc.get_threshold(), strict=True)]
            if any(full):
                gc.collect(max(generation for generation, is_full in enumerate(full) if is_full))

    gc.disable()
    threading.Thread(target=collect, name="garbage", daemon=True).start()


class AsksAgain:
    """An ASGI application around Prefect's that repeats requests.

    For a repeatable request Prefect answers 503 and raises the database's error; a 503 without an error, as of a
    starting server, is passed on.
    """

    def __init__(self, app: App, seconds: float = AGAIN_SECONDS) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(receive)
        except ClientGone:
            return
        until, pause = time.monotonic() + self._seconds, FIRST_PAUSE_SECONDS
        while not await self._answered(scope, body, receive, send, is_last=time.monotonic() + pause > until):
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    async def _answered(
        self, scope: MutableMapping[str, Any], body: bytes, receive: Receive, send: Send, is_last: bool
    ) -> bool:
        unread, messages = [{"type": "http.request", "body": body, "more_body": False}], list[Message]()

        async def read() -> Message:
            return unread.pop() if unread else await receive()

        async def hold_busy(message: Message) -> None:
            if messages or (message["type"] == "http.response.start" and message["status"] == BUSY):
                messages.append(message)
            else:
                await send(message)

        try:
            await self._app({**scope}, read, hold_busy)
        except Exception:  # a request's border: raised again, unless the request is made again
            if messages and not is_last:
                return False
            for message in messages:
                await send(message)
            raise
        for message in messages:
            await send(message)
        return True


def wrap_server() -> None:
    """Prefect's server of this process is made with a page to sign in, `AsksAgain` around it, and `SameOrigin` around both."""
    from prefect.server.api import server
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    create, wrapped = server.create_app, dict[Any, SameOrigin]()

    def create_app(*args: Any, **kwargs: Any) -> SameOrigin:
        app = create(*args, **kwargs)  # the same one for each client that the server has in its own process
        if app not in wrapped:
            app.router.routes.insert(0, Route("/sign-in", lambda request: HTMLResponse(SIGN_IN)))
            wrapped[app] = SameOrigin(AsksAgain(app), LOOPBACK, [IN_PROCESS])
        return wrapped[app]

    server.create_app = create_app  # type: ignore[assignment]


def take_database_url(arguments: list[str]) -> list[str]:
    """The arguments without `--database-url=…`, which Prefect's command does not have: it becomes Prefect's setting."""
    option = "--database-url="
    for argument in arguments:
        if argument.startswith(option):
            os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = argument.removeprefix(option)
    return [argument for argument in arguments if not argument.startswith(option)]


def main() -> None:
    sys.argv[1:] = take_database_url(sys.argv[1:])
    collect_garbage_elsewhere()
    wrap_server()
    from prefect.cli import app

    sys.argv[0] = "prefect"
    app()


if __name__ == "__main__":
    main()
