"""The train service's verbs over HTTP.

Invariant: a call that changes something is applied at most once, however often its request has to be sent; and when it is
not certain that it was applied, the verb raises `InfraError`. Every request has a time limit, and repeating one stops after
`retry_seconds`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx

from roundhouse.config.models import TrainConfig
from roundhouse.errors import ServiceUnreachable
from roundhouse.http.clients import http_client
from roundhouse.retry import Backoff
from roundhouse.training.service import protocol
from roundhouse.training.service.wire import ChannelService

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
PAUSES = Backoff(0.2, longest=10.0)
_UNANSWERED = {502, 503, 504}
"""Status codes of a proxy without an answer from its server."""


class RemoteTrainService(ChannelService):
    """A train service at a URL. The session is opened by the first call.

    Args:
        owner: of the session; the same owner takes it over after a restart, another waits for it to end.
        token: the server's bearer token.
        timeout_seconds: time limit of one request.
        retry_seconds: how long a request without an answer is repeated.
        transport: another way to the server, for tests.
    """

    def __init__(
        self,
        url: str,
        config: TrainConfig,
        *,
        owner: str,
        token: str | None = None,
        temperature: float = 1.0,
        timeout_seconds: float = 600,
        retry_seconds: float = 120,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {protocol.PROTOCOL_HEADER: protocol.PROTOCOL}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        http = http_client(url, headers=headers, timeout=timeout, transport=transport)
        opening = protocol.OpenSession(owner=owner, config=config, temperature=temperature)
        super().__init__(HttpChannel(http, opening, retry_seconds, timeout_seconds))


class HttpChannel:
    """A session with the server, and its calls in order; `timeout_seconds` is the configured limit of one."""

    remedy = " Is it running? It is started by `roundhouse train-server`."

    def __init__(
        self, http: httpx.Client, opening: protocol.OpenSession, retry_seconds: float, timeout_seconds: float
    ) -> None:
        self.http, self.retry_seconds, self.timeout_seconds = http, retry_seconds, timeout_seconds
        self._opening = opening
        self._session: str | None = None
        self._number = 0

    def ask(self, verb: str, body: bytes) -> bytes:
        return self._post(f"/v1/{verb}", body)

    def change(self, verb: str, body: bytes) -> bytes:
        self._number += 1
        return self._post(f"/v1/{verb}", body, {protocol.NUMBER_HEADER: str(self._number)})

    def close(self) -> None:
        if self._session is not None:
            try:
                self.http.delete("/v1/session", headers=self._session_header())
            except httpx.TransportError as error:
                logger.info("the train service ends the session by its time limit: %r", error)
            self._session = None
        self.http.close()

    def _post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
        sent: dict[str, Any] = {"content": body, "headers": self._session_header() | (headers or {})}
        return self._until_answered(path, lambda: self.http.post(path, **sent))

    def _session_header(self) -> dict[str, str]:
        if self._session is None:
            body = self._opening.model_dump_json().encode()
            answer = self._until_answered("the session", lambda: self.http.post("/v1/session", content=body))
            self._session = protocol.parse(protocol.SessionOpened, answer).session
        return {protocol.SESSION_HEADER: self._session}

    def _until_answered(self, what: str, attempt: Callable[[], httpx.Response]) -> bytes:
        """Send until the service answers, and return the body.

        Raises:
            ServiceUnreachable: no answer arrived within `retry_seconds`.
            InfraError: the service failed or lost the session.
        """
        deadline = time.monotonic() + self.retry_seconds
        for number in itertools.count(1):
            pause = PAUSES.pause(number)
            remedy = self.remedy
            try:
                answer = attempt()
                problem = f"status {answer.status_code}" if answer.status_code in _UNANSWERED else None
            except httpx.ReadTimeout:
                problem = f"nothing within train.service.timeout_seconds ({self.timeout_seconds:g} s)"
                remedy = " Raise it where a call takes longer."
            except httpx.TransportError as error:
                problem = repr(error)
            if problem is None:
                return protocol.accepted(answer.status_code, answer.content)
            if time.monotonic() + pause > deadline:
                raise ServiceUnreachable(
                    f"The train service at {self.http.base_url} did not answer to {what}: {problem}.{remedy}"
                )
            logger.warning("no answer to %s (%s): again in %.1f s", what, problem, pause)
            time.sleep(pause)
        raise AssertionError("unreachable: the loop is endless")
