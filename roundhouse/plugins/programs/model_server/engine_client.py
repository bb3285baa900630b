"""Calls to the engines over HTTP, with failover.

Invariant: a call ends within `request_timeout_seconds`, with the engine's reply or a typed error. An engine's
generation changes nothing outside the engine, so a call without an answer (a broken connection, 429, 502, 503, 504,
520) may go to another engine; a refusal (4xx) and a failure (500) are answers and go to the caller. No error text holds
a secret.

The choice of the engine for a session's next call: a pure state machine, without clock, network or tasks.

Invariant: a session stays with its engine while that is in, because its prefix is cached there. A failed engine is out
for a time that doubles with each failure up to a limit, and its sessions move at their next call. An engine that
answers is in, and its failures are forgotten.

              unreachable, 429, 502, 503, 504, 520 (at once)
              500, broken connection, time-out (the third in a row)
        in  ───────────────────────────────────────────────────────>  out for 0.5, 1, 2, … 30 s
         ^                                                                 │
         └──────── the time is over, or (but for doubts) it passes a health check

New sessions go to the engine with the fewest calls in flight; among equals to the one with the fewest sessions so far.
An engine may be several replicas behind a proxy: each call names its session, by which Ray Serve chooses the replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from roundhouse.errors import InfraError
from roundhouse.generation.protocol import (
    BadReply,
    ContextOverflow,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    session_header,
)
from roundhouse.http.clients import client_session
from roundhouse.http.replies import read_reply
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from roundhouse.retry import Backoff

KEEP_ALIVE_SECONDS = 3.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that a call does not meet a connection that just closed."""
_TRY_ANOTHER = frozenset({429, 502, 503, 504, 520})


class EngineForbids(InfraError):
    """An engine does not take our `api_key`."""


class _Repeatable(Exception):
    """This attempt cannot have been answered, so another engine may be asked."""


@dataclass(eq=False, slots=True)
class _QueuedCall:
    """A call that waits for an engine's answer."""

    task: asyncio.Task[Any]
    taken: bool = False
    """It was cancelled to be sent to another engine."""


class EngineClient:
    """The engines of a configuration. Close it in the event loop that used it."""

    def __init__(self, config: ModelServerConfig, limit: int = 0) -> None:
        """`limit` bounds the connections to each engine; 0: one for each call."""
        self._limit = limit
        self.choice = EngineChoice(config.base_url, config.max_sessions)
        self._config = config
        self._secrets = [config.api_key.get_secret_value(), *config.default_headers.values()]
        self._headers = {"Content-Type": "application/json", **config.default_headers}
        if config.api_key.get_secret_value():
            self._headers["Authorization"] = f"Bearer {config.api_key.get_secret_value()}"
        self._waiting: dict[EngineState, set[_QueuedCall]] = {engine: set() for engine in self.choice.engines}
        self._http: aiohttp.ClientSession | None = None
        self._checks: list[asyncio.Task[None]] = []

    async def complete(self, session: str, body: dict[str, Any]) -> tuple[EngineState, Any]:
        """A chat completion, and the engine that made it.

        Raises:
            ContextOverflow, EngineRejected: the request's fault.
            EngineUnreachable, EngineTimeout, EngineFailed, EngineForbids, BadReply: the engines'.
        """
        data, engine = orjson.dumps(body), None
        try:
            async with asyncio.timeout(self._config.request_timeout_seconds):
                tried: list[EngineState] = []
                for _ in range(self._config.max_attempts):
                    # Waits for an engine that is in while the outage may pass.
                    give_up = time.monotonic() + self._config.outage_wait_seconds
                    while (engine := self.choice.choose(session, time.monotonic(), tried)) is None:
                        if self.choice.next_return() > give_up:
                            raise self._unreachable(f"All {len(self.choice.engines)} engines are out")
                        await asyncio.sleep(max(self.choice.next_return() - time.monotonic(), 0.001))
                    try:
                        return engine, await self._ask(engine, "/chat/completions", data, session_header(session))
                    except _Repeatable:
                        tried.append(engine)
        except TimeoutError as error:
            if engine is not None:
                self.choice.doubted(engine, time.monotonic(), "a call timed out")
            raise EngineTimeout(
                f"No answer within request_timeout_seconds={self._config.request_timeout_seconds:g}."
            ) from error
        raise self._unreachable(f"Gave up after {len(tried)} attempts")

    async def tokenize(self, engine: EngineState, body: dict[str, Any]) -> list[int]:
        """The prompt's token IDs as the engine that answered sees them.

        Raises:
            EngineUnreachable, EngineFailed, BadReply, …: as above; it is asked once.
        """
        try:
            async with asyncio.timeout(self._config.request_timeout_seconds):
                reply = await self._ask(engine, "/tokenize", orjson.dumps(body))
        except _Repeatable as error:
            raise EngineUnreachable(f"The engine answered, but not /tokenize: {error}") from error
        except TimeoutError as error:
            raise EngineTimeout("The engine did not answer /tokenize in time.") from error
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(tokens, list):
            raise BadReply("The engine's /tokenize returned no list of tokens.")
        return tokens

    def health(self) -> list[dict[str, Any]]:
        """Return the state of each engine, for GET /health."""
        now = time.monotonic()
        return [
            {
                "url": engine.url,
                "state": "in" if engine.is_in(now) else "out",
                "seconds_until_in": round(max(engine.out_until - now, 0.0), 3),
                "in_flight": engine.in_flight,
                "sessions": engine.sessions,
                "failures": engine.failures,
                "last_error": engine.last_error,
            }
            for engine in self.choice.engines
        ]

    def open(self) -> aiohttp.ClientSession:
        """The HTTP session; the first call on an event loop opens it and begins the health checks."""
        if self._http is None:
            self._http = client_session(
                connector=aiohttp.TCPConnector(
                    limit=0, limit_per_host=self._limit, keepalive_timeout=KEEP_ALIVE_SECONDS
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_seconds),
            )
            self._checks = [asyncio.create_task(self._check(engine)) for engine in self.choice.engines]
        return self._http

    async def close(self) -> None:
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        self._http, self._checks = None, []

    async def _ask(self, engine: EngineState, path: str, data: bytes, session: Mapping[str, str] = {}) -> Any:
        base = engine.url.removesuffix("/v1") if path == "/tokenize" else engine.url
        engine.in_flight += 1
        task = asyncio.current_task()
        assert task is not None
        self._waiting[engine].add(waiting := _QueuedCall(task))
        try:
            headers = {**self._headers, **session}
            async with self.open().post(base + path, data=data, headers=headers, allow_redirects=False) as reply:
                status, answer = reply.status, await read_reply(reply)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise self._failed(engine, f"cannot be reached ({type(error).__name__})") from error
        except aiohttp.ClientError as error:
            # An idle connection may close under a call; only a row of them is the engine's failure.
            text = f"broke the connection ({type(error).__name__})"
            self.choice.doubted(engine, time.monotonic(), text)
            raise _Repeatable(text) from error
        except asyncio.CancelledError:
            if waiting.taken and task.uncancel() == 0:
                raise _Repeatable("does not answer") from None
            raise
        finally:
            self._waiting[engine].discard(waiting)
            engine.in_flight -= 1
        if status != 200:
            raise self._error_of(engine, status, answer)
        self.choice.answered(engine)
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise BadReply(f"The engine's reply is not JSON: {error}") from error

    def _error_of(self, engine: EngineState, status: int, answer: bytes) -> Exception:
        text = answer[:2000].decode(errors="replace")
        for secret in self._secrets:
            if secret:
                text = text.replace(secret, "***")
        if status in _TRY_ANOTHER or (status == 404 and not answer.startswith(b"{")):
            # A proxy that knows no replica yet answers 404 without an error object.
            return self._failed(engine, f"answered {status}: {text[:200]}")
        if status == 400 and ("context length" in text or "max_tokens" in text):
            return ContextOverflow(text)
        if status in (401, 403):
            return EngineForbids(f"The engine answered {status}: check api_key and default_headers.")
        if status < 500:
            self.choice.answered(engine)
            return EngineRejected(f"The engine refuses the request ({status}): {text}")
        self.choice.doubted(engine, time.monotonic(), f"answered {status}: {text[:200]}")
        return EngineFailed(f"The engine answered {status}: {text}")

    def _failed(self, engine: EngineState, text: str) -> _Repeatable:
        self.choice.failed(engine, time.monotonic(), text)
        return _Repeatable(text)

    def _unreachable(self, text: str) -> EngineUnreachable:
        states = "; ".join(f"{engine.url}: {engine.last_error or 'in'}" for engine in self.choice.engines)
        return EngineUnreachable(f"{text}. {states}")

    async def _check(self, engine: EngineState) -> None:
        """Look after one engine for as long as the client is open."""
        url = engine.url.removesuffix("/v1") + "/health"
        while True:
            await asyncio.sleep(self._config.health_check_seconds)
            try:
                async with (
                    asyncio.timeout(self._config.connect_timeout_seconds),
                    self.open().get(url, headers=self._headers) as reply,
                ):
                    status = reply.status
            except TimeoutError:
                self.choice.doubted(engine, time.monotonic(), "its health check timed out")
                # Calls of an engine that hangs go to another one, if there is one.
                now = time.monotonic()
                if not engine.is_in(now) and any(other.is_in(now) for other in self.choice.engines):
                    for waiting in self._waiting[engine]:
                        if not waiting.taken:
                            waiting.taken = True
                            waiting.task.cancel()
            except (aiohttp.ClientError, OSError) as error:
                self.choice.failed(engine, time.monotonic(), f"cannot be reached ({type(error).__name__})")
            else:
                # An engine without /health answers 404, which shows that it is there.
                if status < 500:
                    self.choice.passed_check(engine)
                else:
                    self.choice.failed(engine, time.monotonic(), f"its health check answered {status}")


LONGEST_OUT_SECONDS = 30.0
OUT = Backoff(0.5, longest=LONGEST_OUT_SECONDS)
DOUBTS = 3
"""Doubtful failures in a row that take an engine out: fewer may come from one request that no engine survives."""


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine."""

    url: str
    in_flight: int = 0
    sessions: int = 0
    """Sessions ever given to it."""
    failures: int = 0
    """Times in a row that it was taken out."""
    doubts: int = 0
    distrusted: bool = False
    """It went out by doubts: only time brings it back, since it looks healthy."""
    out_until: float = 0.0
    last_error: str = ""

    def is_in(self, now: float) -> bool:
        return self.out_until <= now


class EngineChoice:
    """The engines of a model server and the sessions they serve."""

    def __init__(self, urls: Sequence[str], max_sessions: int) -> None:
        self.engines = [EngineState(url) for url in urls]
        self._max_sessions = max_sessions
        self._session: OrderedDict[str, EngineState] = OrderedDict()

    def choose(self, session: str, now: float, tried: Collection[EngineState] = ()) -> EngineState | None:
        """Return the session's engine, or another one if that is out; None while all are out.

        Args:
            tried: engines that have just failed this request; chosen only if no other is in.
        """
        session_engine = self._session.get(session)
        if session_engine is not None and session_engine.is_in(now) and session_engine not in tried:
            self._session.move_to_end(session)
            return session_engine
        ready = [engine for engine in self.engines if engine.is_in(now)]
        ready = [engine for engine in ready if engine not in tried] or ready
        if not ready:
            return None
        engine = min(ready, key=lambda engine: (engine.in_flight, engine.sessions))
        engine.sessions += self._session.get(session) is not engine
        self._session[session] = engine
        self._session.move_to_end(session)
        if len(self._session) > self._max_sessions:
            self._session.popitem(last=False)
        return engine

    def next_return(self) -> float:
        """When the first engine that is out comes back."""
        return min(engine.out_until for engine in self.engines)

    @staticmethod
    def answered(engine: EngineState) -> None:
        """Record that an engine answered a call, and forget its failures."""
        engine.failures = engine.doubts = 0
        engine.out_until, engine.last_error, engine.distrusted = 0.0, "", False

    @staticmethod
    def failed(engine: EngineState, now: float, error: str) -> None:
        """It cannot serve. Calls that fail together count once: they met the same failure."""
        engine.last_error = error
        if not engine.is_in(now):
            return
        engine.failures += 1
        engine.out_until = now + OUT.pause(engine.failures)
        engine.doubts, engine.distrusted = 0, False

    def doubted(self, engine: EngineState, now: float, error: str) -> None:
        """It failed a call in a way that may be the call's own fault."""
        engine.doubts += 1
        if engine.doubts >= DOUBTS:
            self.failed(engine, now, error)
            engine.distrusted = True
        else:
            engine.last_error = error

    @staticmethod
    def passed_check(engine: EngineState) -> None:
        """It is healthy by its own account: in again, but the next failure takes it out for longer, until it answers a call."""
        if not engine.distrusted:
            engine.out_until = 0.0
