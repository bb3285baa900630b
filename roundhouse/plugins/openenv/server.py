"""`roundhouse openenv serve`: an environment over OpenEnv's protocol.

Invariant: a connection has one session, at most `sessions` are open, and each ends with its connection or after an idle time. A
closed connection cancels its work. Errors have OpenEnv's codes and keep the connection open.

    /ws                             {"type": "reset" | "step" | "state" | "close", "data": {…}}, one reply each
    POST /reset, POST /step         one episode per request: {"seed": 3}, {"seed": 3, "action": {"text": "…"}}
    GET /health, /metadata, /schema, /state
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import orjson
import typer
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from roundhouse.cli.options import out
from roundhouse.environments import environment_config, load_to_serve
from roundhouse.environments.base import Environment, GymnasiumEnvironment, Toolbox, read_arguments
from roundhouse.errors import DataError, InfraError, RoundhouseError
from roundhouse.http.asgi import Application, BodyLimit, ClientGone, while_connected
from roundhouse.http.asgi import serve as serve_application
from roundhouse.http.sessions import IDLE_SECONDS, SessionEnded, TooManySessions
from roundhouse.plugins.openenv.environment import BAD_ACTION, MOST_MESSAGE_BYTES
from roundhouse.plugins.openenv.episodes import Action, Observed, Session, Tasks
from roundhouse.user_code import shown

REQUEST_SECONDS = 600.0
"""Time limit of one action."""
DISCONNECT = "websocket.disconnect"
app = typer.Typer(no_args_is_help=True, help="Environments by OpenEnv's protocol.")


@app.command()
def serve(
    environment: Annotated[str, typer.Option(help="Kind of environment, or module:Class.")],
    parameters: Annotated[str, typer.Option(help="Its parameters as a JSON object.")] = "{}",
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    sessions: Annotated[int, typer.Option(help="Most sessions at once.", min=1)] = 64,
    idle_seconds: Annotated[float, typer.Option(help="Idle time after which a session ends.", min=0.1)] = IDLE_SECONDS,
) -> None:
    """Serve an environment to clients of OpenEnv until Ctrl-C."""
    application = build_app(load_to_serve(environment_config(environment, parameters)), sessions, idle_seconds)
    out(f"Serving {environment} at http://{host}:{port}. Ctrl-C ends it.")
    serve_application(application, host, port, ws_max_size=MOST_MESSAGE_BYTES)


def build_app(environment: Environment | GymnasiumEnvironment, sessions: int, idle_seconds: float) -> Application:
    """Return the server of an environment.

    Raises:
        ConfigError: the environment has no tasks.
    """
    toolbox = None if isinstance(environment, GymnasiumEnvironment) else Toolbox(environment)
    make = functools.partial(Session, environment, toolbox, Tasks(environment))
    server = _Server(make, sessions, idle_seconds)
    facts = {
        "/health": {"status": "healthy"},
        "/metadata": {"name": environment.name, "description": f"{environment.name}, served by Roundhouse"},
        "/schema": {
            "action": TypeAdapter(Action).json_schema(),
            "observation": Observed.model_json_schema(),
            "state": TypeAdapter(dict[str, Any]).json_schema(),
        },
        "/state": {"episode_id": None, "step_count": 0},
    }
    routes = [Route(path, _constant(value)) for path, value in facts.items()]
    routes += [Route(path, server.request, methods=["POST"]) for path in ("/reset", "/step")]
    return BodyLimit(Starlette(routes=[*routes, WebSocketRoute("/ws", server.connection)]), MOST_MESSAGE_BYTES)


class _BadJson(DataError):
    """A message that is not JSON."""


class _Server:
    """Sessions of connections and requests."""

    def __init__(self, make: Callable[[], Session], sessions: int, idle_seconds: float) -> None:
        self._make, self._sessions, self._idle_seconds = make, sessions, idle_seconds
        self._active = 0

    async def connection(self, socket: WebSocket) -> None:
        """Answer the messages of one client."""
        await socket.accept()
        with contextlib.suppress(ClientGone, RuntimeError, WebSocketDisconnect):  # RuntimeError: it is closed already
            try:
                async with self._session() as session:
                    await self._converse(socket, session)
            except InfraError as error:
                await socket.send_text(_written("error", _failure(error)[1]))
            await socket.close()

    async def request(self, request: Request) -> Response:
        """Begin an episode, play the action of a /step in it, and end it."""
        try:
            body = _read((await request.body()).decode() or "{}")
            async with self._session() as session, asyncio.timeout(REQUEST_SECONDS):
                observed = await session.reset(body)
                if request.url.path.endswith("/step"):
                    observed = await session.step(body.get("action"))
                return _json(observed.wire())
        except Exception as error:  # noqa: BLE001 - the environment's code ends here
            status, detail = _failure(error)
            return _json({"detail": detail}, status)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        if self._active >= self._sessions:
            raise TooManySessions(f"All {self._sessions} sessions are in use. Start the server with more --sessions.")
        self._active += 1
        session = self._make()
        try:
            yield session
        finally:
            self._active -= 1
            await session.close()

    async def _converse(self, socket: WebSocket, session: Session) -> None:
        incoming = asyncio.ensure_future(socket.receive())

        async def disconnected() -> None:
            if (await asyncio.shield(incoming))["type"] != DISCONNECT:
                await asyncio.Event().wait()  # the next message waits for its turn

        try:
            while True:
                try:
                    message = await asyncio.wait_for(incoming, self._idle_seconds)
                except TimeoutError:
                    raise SessionEnded(f"The session was idle for {self._idle_seconds:g} s.") from None
                if message["type"] == DISCONNECT:
                    return
                incoming = asyncio.ensure_future(socket.receive())
                reply = await while_connected(disconnected, _reply(session, message.get("text") or ""))
                if reply is None:
                    return
                await socket.send_text(reply)
        finally:
            incoming.cancel()


async def _reply(session: Session, text: str) -> str | None:
    """Return the reply to a message; None to `close`."""
    try:
        message = _read(text)
        kind = message.get("type")
        if kind == "close":
            return None
        if kind == "state":
            return _written("state", session.state())
        if kind not in ("reset", "step"):
            return _written("error", {"message": f"Unknown message type: {kind}", "code": "UNKNOWN_TYPE"})
        async with asyncio.timeout(REQUEST_SECONDS):
            data = message.get("data", {})
            observed = await (session.reset(data) if kind == "reset" else session.step(data))
        return _written("observation", observed.wire())
    except Exception as error:  # noqa: BLE001 - the environment's code ends here
        return _written("error", _failure(error)[1])


def _read(text: str) -> dict[str, Any]:
    try:
        value = read_arguments(text)
    except ValueError as error:
        raise _BadJson(f"Invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _BadJson("Invalid JSON: send an object.")
    return value


def _failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and data of an error."""
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_context=False, include_input=False)
        return 422, {"message": "Invalid message", "code": BAD_ACTION, "errors": details}
    text = str(error) if isinstance(error, RoundhouseError) else shown(error)
    kinds = (
        (_BadJson, 422, "INVALID_JSON"),
        (TooManySessions, 503, "CAPACITY_REACHED"),
        (InfraError, 503, "SESSION_ERROR"),
    )
    status, code = next((each[1:] for each in kinds if isinstance(error, each[0])), (500, "EXECUTION_ERROR"))
    return status, {"message": text, "code": code}


def _written(kind: str, data: dict[str, Any]) -> str:
    return orjson.dumps({"type": kind, "data": data}).decode()


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _constant(value: Any) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return _json(value)

    return answer
