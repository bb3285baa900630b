"""The served policy over HTTP, as a `PolicyClient`.

Invariant: a call ends within its time limit, with a completion or a typed error, and never invents an answer.
`rollout.concurrency` bounds the calls in flight. A call is repeated only if a replica refused it before it generated a
token, because its weights are not whole: another replica may accept it. The caller decides about all other repetitions.

The calls of one rollout (`for_rollout`) name it in a header, by which Ray Serve routes them to one replica: its prefix
cache holds the conversation so far. Any replica can answer any call, so a lost one costs each of its rollouts a
prefill.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import GenerationConfig, Sampling
from roundhouse.generation.protocol import (
    TOKEN_FIELDS,
    BadReply,
    Completion,
    ContextOverflow,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    PolicyClient,
    message_problem,
    session_header,
)
from roundhouse.http.clients import client_session
from roundhouse.http.replies import MALFORMED, read_reply
from roundhouse.retry import Backoff
from roundhouse.trajectories.storable import call_problem, shown, storable_json

PATH = "/v1/chat/completions"
REFUSED_ATTEMPTS, REFUSED_PAUSES = 4, Backoff(0.1, factor=3)
"""Attempts and pauses for a call that replicas refuse."""
FINISHES = ("stop", "length", "tool_calls")
PASSING = frozenset({404, 408, 429, 502, 503, 504})
"""Statuses of a proxy that knows no replica (404 while Serve starts), is full or waits for one: they pass by themselves."""
JSON_HEADERS = {"Content-Type": "application/json"}


class HttpPolicyClient:
    """Use as an asynchronous context manager.

    async with HttpPolicyClient("http://127.0.0.1:8000", config.generation) as policy:
        completion = await policy.complete(messages, tools, sampling, seed)
    """

    def __init__(self, base_url: str, config: GenerationConfig, *, model: str = "policy") -> None:
        self.url = base_url.rstrip("/") + PATH
        self.timeout_seconds = config.request_timeout_seconds
        self.model = model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpPolicyClient:
        allow_open_files()
        self._session = client_session(
            connector=PacedConnector(),
            timeout=aiohttp.ClientTimeout(total=self.timeout_seconds),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def for_rollout(self, rollout_id: str) -> PolicyClient:
        """The client for the calls of one rollout; see `ReplicatedPolicy.for_rollout`."""
        return _RolloutClient(self, session_header(rollout_id))

    async def complete(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        sampling: Sampling,
        seed: int,
        headers: Mapping[str, str] = {},
    ) -> Completion:
        """Answer a conversation; see `PolicyClient.complete`."""
        body = request_bytes(request_body(messages, tools, sampling, seed, self.model))
        headers = {**JSON_HEADERS, **headers}
        with ACTIVITY.track("engine", "model call", where=self.url):
            status, data, latency = await self._timed_post(body, headers)
            for attempt in range(1, REFUSED_ATTEMPTS):
                if status != 503 or b'"policy_unavailable"' not in data:
                    break
                await asyncio.sleep(REFUSED_PAUSES.pause(attempt))
                status, data, latency = await self._timed_post(body, headers)
        if status != 200:
            raise error_of(status, data, self.url)
        return read_completion(data, latency, self.url)

    async def _timed_post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes, float]:
        """Status, body, and seconds that it took."""
        if self._session is None:
            raise RuntimeError("HttpPolicyClient is not open: use it in `async with`.")
        started = time.perf_counter()
        try:
            async with self._session.post(self.url, data=body, headers=headers, allow_redirects=False) as reply:
                return reply.status, await read_reply(reply), time.perf_counter() - started
        except TimeoutError as error:
            raise EngineTimeout(
                f"{self.url} did not answer within {self.timeout_seconds:g} s (generation.request_timeout_seconds)."
            ) from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{self.url} cannot be reached: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _RolloutClient:
    client: HttpPolicyClient
    headers: Mapping[str, str]

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        return await self.client.complete(messages, tools, sampling, seed, self.headers)


def request_body(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int, model: str
) -> dict[str, Any]:
    """The request's JSON. Recorded tokens travel once, on the newest message that has them, so payloads stay linear."""
    body: dict[str, Any] = {
        "model": model,
        "messages": without_older_tokens(messages),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
    }
    if tools:
        body["tools"] = tools
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    return body


def request_bytes(body: dict[str, Any]) -> bytes:
    """The request as JSON. A lone surrogate, which JSON cannot carry, is sent as it is recorded (`storable_text`).

    Raises:
        EngineRejected: a message or a tool holds something else than JSON.
    """
    try:
        return orjson.dumps(body)
    except TypeError:  # includes JSONEncodeError
        pass
    try:
        return orjson.dumps(storable_json(body))
    except TypeError as error:
        raise EngineRejected(f"The conversation or its tools cannot be sent as JSON: {error}") from error


def without_older_tokens(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with token fields on none but the newest message that carries them."""
    newest = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get(TOKEN_FIELDS[0])), -1)
    return [
        {key: value for key, value in message.items() if key not in TOKEN_FIELDS}
        if index != newest and not message.keys().isdisjoint(TOKEN_FIELDS)
        else message
        for index, message in enumerate(messages)
    ]


def error_of(status: int, data: bytes, url: str) -> Exception:
    """The typed error of a reply that is not 200.

    Only our server's own 4xx replies are the request's fault. Of others, without our error body, those of `PASSING` come from a
    proxy; the rest is an engine's failure, or something else that answers at this URL.
    """
    try:
        error = orjson.loads(data)["error"]
        code, text = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        code, text = None, data[:500].decode(errors="replace")
    if code == "context_length_exceeded":
        return ContextOverflow(text)
    if code is not None and 400 <= status < 500:
        return EngineRejected(f"The engine refuses the request ({status} {code}): {text}")
    kind = EngineUnreachable if status in PASSING else EngineFailed
    return kind(f"{url} answered {status}: {text}")


def read_completion(data: bytes, latency: float, url: str) -> Completion:
    """Parse a chat completion's JSON into `Completion`.

    Raises:
        BadReply: another program answers at this URL, or a field has another type or size.
    """
    try:
        reply = orjson.loads(data)
        choice = reply["choices"][0]
        message = choice["message"]
        prompt, generation, log_probs = (message.pop(key) for key in TOKEN_FIELDS)
        version, spans = reply["policy_version"], reply.get("version_spans")
        if problem := call_problem(prompt, generation, log_probs, version, spans) or completed_problem(message):
            raise ValueError(problem)
        if choice["finish_reason"] not in FINISHES:
            raise ValueError(f"finish_reason is {shown(choice['finish_reason'])}, not one of {', '.join(FINISHES)}")
        return Completion(
            message=message,
            finish_reason=choice["finish_reason"],
            prompt_token_ids=prompt,
            generation_token_ids=generation,
            generation_log_probs=log_probs,
            policy_version=version,
            latency_seconds=latency,
            version_spans=spans,
        )
    except MALFORMED as error:
        begins = data[:200].decode(errors="replace")
        raise BadReply(
            f"{url} answered 200 with something else than a chat completion with token IDs ({type(error).__name__}: {error}): "
            f"{begins!r}. Is it the policy's server?"
        ) from error


def completed_problem(message: dict[str, Any]) -> str:
    """Return the fault of a completion's message; empty if a conversation can hold it."""
    if problem := message_problem(message, strict=True):
        return problem
    for call in message.get("tool_calls") or ():
        texts = (call.get("id"), call["function"]["name"], call["function"].get("arguments"))
        if not all(isinstance(text, str) for text in texts):
            return "a tool call has an id, a name and arguments, all text"
    return ""


OPENING_AT_ONCE = 128


def allow_open_files() -> None:
    """Raise the soft limit to the hard one: each model call in flight is a socket, and the usual soft limit of 1024 would bound
    `rollout.concurrency` by errors that name the engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class PacedConnector(aiohttp.TCPConnector):
    """Open few connections at once. Thousands of simultaneous rollouts would overflow the server's accept queue (2048
    with uvicorn), and dropped connections run into their time limit. Waiting here does not count against the limit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"limit": 0, **options})
        self._opening = asyncio.Semaphore(OPENING_AT_ONCE)

    async def _create_connection(self, *arguments: Any, **options: Any) -> Any:
        async with self._opening:
            return await super()._create_connection(*arguments, **options)
