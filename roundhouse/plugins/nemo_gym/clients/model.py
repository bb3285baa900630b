"""A model server as the policy of one rollout: any server of NeMo Gym's /v1/chat/completions or /v1/responses.

Invariant: a call ends within its time limit, with a completion or a typed error. The model server gets the sampling
parameters of the task row, and chooses all others. A rollout's cookies accompany each of its calls, so that these reach
one engine. A call is repeated only if the server was busy or refused the connection, and at most `ATTEMPTS` times.

    server = ModelServerClient("http://127.0.0.1:8100")
    policy = server.rollout(row["responses_create_params"])       one per rollout
    completion = await policy.complete(messages, tools, sampling, seed)

A server that returns no tokens gives completions without tokens: they can be judged, but not trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Literal

import orjson

from roundhouse.config.models import Sampling
from roundhouse.errors import InfraError
from roundhouse.generation.client import completed_problem, without_older_tokens
from roundhouse.generation.protocol import (
    TOKEN_FIELDS,
    BadReply,
    Completion,
    ContextOverflow,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from roundhouse.http.replies import MALFORMED
from roundhouse.plugins.nemo_gym.clients.connection import BUSY, Connection, Cookies
from roundhouse.retry import Backoff
from roundhouse.rollout.protocol import EnvironmentTimeout, EnvironmentUnavailable, EnvironmentUnreachable
from roundhouse.rollout.responses import Message, chat_messages, items_from_chat
from roundhouse.trajectories.storable import call_problem

Route = Literal["chat", "responses"]

ATTEMPTS = 3
PAUSES = Backoff(0.5)
UNLIMITED_TOKENS = 1_000_000_000
"""`Sampling.max_new_tokens` from here on means that the model server decides."""

_PATHS: dict[Route, str] = {"chat": "v1/chat/completions", "responses": "v1/responses"}
_CHAT_NAMES = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "top_logprobs",
        "metadata",
        "user",
        "service_tier",
        "store",
        "parallel_tool_calls",
        "tool_choice",
    )
}
"""Parameters that both routes know, by the name of the chat route. `max_output_tokens` and `reasoning` have others there."""
_OURS = frozenset({"input", "instructions", "tools", "max_output_tokens", "max_tool_calls", "stream"})
"""Parameters that the agent loop takes care of."""


class ModelServerClient:
    """Connections to one model server. Close it in the event loop that used it."""

    def __init__(self, url: str, route: Route = "chat", call_seconds: float = 600.0, limit: int = 0) -> None:
        """Connect to a model server.

        Raises:
            ConfigError: `url` is invalid.
        """
        self._connection = Connection(url, call_seconds, key="model_server", limit=limit)
        self._route = route

    def rollout(self, params: Mapping[str, Any], *, prefix: str = "", cookies: Cookies | None = None) -> RolloutPolicy:
        """The policy of one rollout.

        Args:
            params: the row's `responses_create_params`.
            prefix: path before the route, such as `ng-rollout/3-0`, by which the server files the calls.
            cookies: the rollout's cookies at this server; kept up to date in place.
        """
        path = f"{prefix.strip('/')}/{_PATHS[self._route]}".lstrip("/")
        return RolloutPolicy(self._connection, self._route, path, params, {} if cookies is None else cookies)

    async def close(self) -> None:
        await self._connection.close()


class RolloutPolicy:
    """A `PolicyClient` that belongs to one rollout."""

    def __init__(
        self, connection: Connection, route: Route, path: str, params: Mapping[str, Any], cookies: Cookies
    ) -> None:
        self._connection = connection
        self._route = route
        self._path = path
        self._params = params
        self.cookies = cookies

    async def complete(
        self, messages: list[Message], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        """Answer a conversation; see `PolicyClient.complete`. `seed` is not sent: model servers draw for themselves."""
        limit = sampling.max_new_tokens if sampling.max_new_tokens < UNLIMITED_TOKENS else None
        compose = chat_body if self._route == "chat" else responses_body
        body = orjson.dumps(compose(without_older_tokens(messages), tools, self._params, limit))
        start = time.perf_counter()
        status, text = await self._answer(body)
        latency = time.perf_counter() - start
        where = f"{self._connection.url}/{self._path}"
        if status != 200:
            raise EngineRejected(f"{where} answered {status}: {text[:2000]}")
        try:
            read = read_chat if self._route == "chat" else read_responses
            return read(orjson.loads(text), latency)
        except MALFORMED as error:
            raise BadReply(
                f"{where} answered 200 with something else than a reply ({error!r}): {text[:500]}"
            ) from error

    async def _answer(self, body: bytes) -> tuple[int, str]:
        """Status and text of the first answer that is worth having.

        Raises:
            EngineUnreachable, EngineTimeout, EngineFailed
        """
        last = ""
        kind: type[InfraError] = EngineUnreachable
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSES.pause(attempt))
            try:
                status, text, _ = await self._connection.exchange("POST", self._path, body, self.cookies)
            except EnvironmentTimeout as error:
                raise EngineTimeout(str(error)) from error
            except (EnvironmentUnreachable, EnvironmentUnavailable) as error:
                last, kind = str(error), EngineUnreachable
                continue
            if status not in BUSY and status < 500:
                return status, text
            last = f"{self._connection.url}/{self._path} answered {status}: {text[:2000]}"
            # 502 is how a model server passes an engine's failure on; 503 and 504 mean that no engine answers it.
            kind = EngineUnreachable if status in BUSY and status != 502 else EngineFailed
            if status not in BUSY:  # a defect there; asking again would cost the same
                break
        raise kind(last)


def chat_body(
    messages: list[Message], tools: list[dict[str, Any]], params: Mapping[str, Any], max_tokens: int | None
) -> dict[str, Any]:
    """A /v1/chat/completions request."""
    body: dict[str, Any] = {"model": params.get("model") or "policy", "messages": messages}
    body |= {_CHAT_NAMES[key]: value for key, value in params.items() if key in _CHAT_NAMES and value is not None}
    if (effort := (params.get("reasoning") or {}).get("effort")) is not None:
        body["reasoning_effort"] = effort
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return _with_tools(body, tools)


def responses_body(
    messages: list[Message], tools: list[dict[str, Any]], params: Mapping[str, Any], max_tokens: int | None
) -> dict[str, Any]:
    """A /v1/responses request: the row's parameters as they are, the whole conversation as its input."""
    body = {key: value for key, value in params.items() if key not in _OURS and value is not None}
    body["input"] = items_from_chat(messages)
    if max_tokens is not None:
        body["max_output_tokens"] = max_tokens
    return _with_tools(body, [{"strict": False, **tool["function"], "type": "function"} for tool in tools])


def _with_tools(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    if tools:
        return {**body, "tools": tools}
    return {key: value for key, value in body.items() if key not in ("tool_choice", "parallel_tool_calls")}


def read_chat(reply: dict[str, Any], latency: float) -> Completion:
    """Read a chat completion.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it has another shape.
        ContextOverflow: by the server's answer, the prompt leaves no room.
    """
    choice = reply["choices"][0]
    return _completion(choice["message"], choice.get("finish_reason") or "stop", reply, latency)


def read_responses(reply: dict[str, Any], latency: float) -> Completion:
    """Read a Responses object with one reply of the policy as its output.

    Raises:
        ContextOverflow: as above.
        EngineRejected: the output holds other items than the policy's reply.
    """
    messages = chat_messages(reply["output"])
    if [message["role"] for message in messages] not in ([], ["assistant"]):
        raise EngineRejected("The model server's output is not one reply of the policy: it runs tools itself.")
    reason = (reply.get("incomplete_details") or {}).get("reason")
    return _completion(
        messages[0] if messages else {"content": None}, "stop" if reason is None else "length", reply, latency
    )


def _completion(told: Message, finish: str, reply: dict[str, Any], latency: float) -> Completion:
    content, calls = told.get("content"), told.get("tool_calls")
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    prompt, generation, log_probs = (told.get(name) or [] for name in TOKEN_FIELDS)
    version, spans = reply.get("policy_version") or 0, told.get("version_spans")
    if problem := completed_problem(message) or call_problem(prompt, generation, log_probs, version, spans):
        raise ValueError(problem)
    if finish not in ("stop", "tool_calls"):
        finish = "length"  # also content_filter: something was cut away
    if finish == "length" and not (content or calls or generation or reply.get("usage")):
        raise ContextOverflow("The model server reports that the conversation leaves no room for a reply.")
    return Completion(
        message=message,
        finish_reason=finish,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=log_probs,
        policy_version=version,
        latency_seconds=latency,
        version_spans=spans,
    )
