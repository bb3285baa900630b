"""The HTTP side of a replica, as a plain ASGI application.

Invariant: every reply of `/v1/chat/completions` names the policy version that generated its tokens, in the body and in
the `x-policy-version` header (the oldest one after a refit in between; `version_spans` then has all), and the replica
(`x-replica-id`). The message carries prompt and generation token IDs with log-probabilities. Every failure is a JSON
`error` with a stable `code`; 4xx means that the request cannot be answered, 503 that this replica must not answer now.
If a caller disconnects, its generation ends. The metric `roundhouse_engine_ready` is 1 exactly if the replica answers
with its desired version.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson

from roundhouse.generation.chat import ChatCodec, ContinuationBroken
from roundhouse.generation.protocol import TOKEN_FIELDS, AsgiApp, BadRequest, Generated, read_request
from roundhouse.generation.rendering import RENDER_SECONDS, awaited_within
from roundhouse.generation.served_policy import PolicyUnavailable, SamplingRefused, ServedPolicy
from roundhouse.http.asgi import (
    JSON,
    BodyLimit,
    ClientGone,
    Receive,
    Send,
    authorized,
    read_body,
    reply,
    reply_error,
    reply_json,
    while_connected,
)
from roundhouse.trajectories.records import CallStage

logger = logging.getLogger(__name__)

T = TypeVar("T")
RENDERINGS = 8
"""At once. More gain nothing: Python runs one at a time."""

Bring = Callable[[str, dict[str, Any]], Awaitable[list[dict[str, Any]]]]

ENGINE_ROUTES = {
    *(("GET", path) for path in ("/version", "/load", "/ping", "/tokenizer_info")),
    *(("POST", path) for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/responses", "/v1/messages")),
}
"""The engine's read-only routes that are passed on. Routes that change an engine (vLLM's /pause, /sleep,
/update_weights, /collective_rpc, /v1/load_lora_adapter and the like) are not reachable from outside; weights change
by the wanted version."""


class ChatServer:
    """Our routes; everything else goes to the engine's own OpenAI application."""

    def __init__(self, policy: ServedPolicy, codec: ChatCodec, model: str) -> None:
        self.policy = policy
        self.codec = codec
        self.model = model
        self.replicas: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
        """Function that returns the status of every replica, if there may be several."""
        self.bring: Bring | None = None
        """Hands every replica of an application (its digest) a desired state; gives the status of each."""
        self.replace: Callable[[list[str]], Awaitable[list[str]]] | None = None
        """Function that ends other replicas by their actors' names, and returns the names that existed."""
        self.control_token: str | None = None
        """Token that a caller of `bring` or `replace` has to present; without one their routes do not exist."""
        self._limited = BodyLimit(self._answer)
        self._rendering = asyncio.Semaphore(RENDERINGS)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._limited(scope, receive, send)
            return
        ended = False
        while not ended:  # nothing to start or stop here: Serve owns the replica's life
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            ended = message["type"] == "lifespan.shutdown"

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        match scope.get("method"), scope["path"]:
            case "POST", "/v1/chat/completions":
                await self._chat(receive, send)
            case "POST", "/rh/parsed":
                await self._parsed(receive, send)
            case "GET", "/v1/models":
                limit = self.codec.max_model_len
                model = {"id": self.model, "object": "model", "owned_by": "roundhouse", "max_model_len": limit}
                await reply_json(send, 200, {"object": "list", "data": [model]})
            case "GET", "/rh/status":
                await reply_json(send, 200, self.policy.status())
            case "GET", "/rh/replicas":
                replicas = [self.policy.status()] if self.replicas is None else await self.replicas()
                await reply_json(send, 200, {"replicas": replicas})
            case "POST", "/rh/desired" if self.bring is not None and self.control_token is not None:
                if await authorized(scope, send, self.control_token, "Ray's token (RAY_AUTH_TOKEN)"):
                    await self._bring(self.bring, receive, send)
            case "POST", "/rh/replaced" if self.replace is not None and self.control_token is not None:
                if await authorized(scope, send, self.control_token, "Ray's token (RAY_AUTH_TOKEN)"):
                    await self._replace(self.replace, receive, send)
            case "GET", "/health":
                status = self.policy.status()
                report = {name: status[name] for name in ("ready", "error")}
                await reply_json(send, 200 if status["ready"] else 503, report)
            case "GET", "/ready":
                status = self.policy.status()
                ready = holds_desired_version(status)
                report = {"ready": ready} | {name: status[name] for name in ("policy_version", "desired", "error")}
                await reply_json(send, 200 if ready else 503, report)
            case "GET", "/metrics":
                own = metrics_page(self.policy.status()).encode()
                text = own + await engine_metrics_page(self.policy.engine.openai_app())
                await reply(send, 200, text, b"text/plain; version=0.0.4; charset=utf-8")
            case _:
                await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer with the engine's own OpenAI application if it has the route; /tokenize of a conversation is ours."""
        route = (scope.get("method"), scope["path"])
        if route == ("POST", "/tokenize"):
            raw = await read_body(receive)
            if await self._tokenized(raw, send):
                return
            receive = _replayed(raw, receive)
        app = self.policy.engine.openai_app()
        if app is None or route not in ENGINE_ROUTES:
            await reply_error(send, 404, "not_found", f"The path {scope['path']} does not exist.")
            return
        # The engine's own routes, too, keep the weights as they are while a request that uses them runs
        if scope.get("method") != "POST" or scope["path"] in ("/tokenize", "/detokenize"):
            await app(scope, receive, send)
            return
        if self.policy.samples_as_wanted_only:
            text = "This engine serves a run with its own sampling parameters. Only /v1/chat/completions uses them."
            await reply_error(send, 400, "sampling_refused", text)
            return
        try:
            async with self.policy.answering():
                await app(scope, receive, send)
        except PolicyUnavailable as error:
            await reply_error(send, 503, "policy_unavailable", str(error))

    async def _tokenized(self, raw: bytes, send: Send) -> bool:
        """Answer /tokenize for a conversation: the prompt that a chat completion of it gets, recorded tokens continued.
        False leaves anything else (a plain text) to the engine's own route, which knows of no recorded tokens."""
        try:
            body = _json(raw)
            if not isinstance(body, dict) or "messages" not in body:
                return False
            request = read_request(body, self.model)
            tokens = (await self._rendered(lambda: self.codec.prompt(request))).token_ids
        except BadRequest as error:
            await reply_error(send, error.status, error.code, str(error), error.parameter)
        except ContinuationBroken as error:
            await reply_error(send, 400, "continuation_broken", str(error), "messages")
        else:
            await reply_json(send, 200, token_list(tokens, self.codec.max_model_len))
        return True

    async def _rendered(self, work: Callable[[], T]) -> T:
        """The result of work of the codec that renders, off the event loop and within a time limit."""
        async with self._rendering:
            return await awaited_within(RENDER_SECONDS, work)

    async def _bring(self, bring: Bring, receive: Receive, send: Send) -> None:
        try:
            body = _json(await read_body(receive))
            status = await bring(body["application"], body["desired"])
        except (BadRequest, KeyError, TypeError, ValueError) as error:
            await reply_error(send, 400, "invalid_request", f"{type(error).__name__}: {error}")
            return
        await reply_json(send, 200, {"replicas": status})

    async def _replace(
        self, replace: Callable[[list[str]], Awaitable[list[str]]], receive: Receive, send: Send
    ) -> None:
        try:
            actors = _json(await read_body(receive))["actors"]
            names = await replace([str(name) for name in actors])
        except (BadRequest, KeyError, TypeError, ValueError) as error:
            await reply_error(send, 400, "invalid_request", f"{type(error).__name__}: {error}")
            return
        await reply_json(send, 200, {"actors": names})

    async def _parsed(self, receive: Receive, send: Send) -> None:
        """Return an assistant message (`message`, with `tools`) as the chat template writes it, and the parsed result
        of that text."""
        try:
            body = _json(await read_body(receive))
            message, tools = body["message"], body["tools"]
            text = await self._rendered(lambda: self.codec.written(message, tools))
        except (BadRequest, KeyError, TypeError) as error:
            await reply_error(send, 400, "invalid_request", f"{type(error).__name__}: {error}")
            return
        ids = self.codec.encode(text)
        message, _ = self.codec.message(Generated(ids, [0.0] * len(ids), "stop"), body["tools"])
        await reply_json(send, 200, {"text": text, "message": message})

    async def _chat(self, receive: Receive, send: Send) -> None:
        raw = await read_body(receive)
        try:
            body = await self._completion(raw, receive)
            data = orjson.dumps(body)
        except BadRequest as error:
            await reply_error(send, error.status, error.code, str(error), error.parameter)
        except ContinuationBroken as error:
            await reply_error(send, 400, "continuation_broken", str(error), "messages")
        except SamplingRefused as error:
            await reply_error(send, 400, "sampling_refused", str(error), error.parameter)
        except PolicyUnavailable as error:
            await reply_error(send, 503, "policy_unavailable", str(error))
        except ClientGone:
            raise
        except Exception as error:
            logger.exception("a chat completion failed")
            await reply_error(send, 500, "engine_error", f"{type(error).__name__}: {error}")
        else:
            version, replica = str(body["policy_version"]), self.policy.replica_id
            headers = (b"x-policy-version", version.encode()), (b"x-replica-id", replica.encode())
            await reply(send, 200, data, JSON, *headers)

    async def _completion(self, raw: bytes, receive: Receive) -> dict[str, Any]:
        """The reply to a request."""
        request = read_request(_json(raw), self.model)
        self.policy.require_sampling(request.draw)
        prompt = await self._rendered(lambda: self.codec.prompt(request))
        generated = await while_connected(receive, self.policy.answer(prompt.token_ids, prompt.draw))
        message, finish_reason = self.codec.message(
            generated,
            request.tools,
            prompt_token_ids=prompt.token_ids,
            only_first_call=request.only_first_call,
        )
        log_probs = self.codec.log_probs(generated) if request.logprobs and generated.log_probs else None
        message["prompt_token_ids"] = prompt.token_ids
        message["generation_token_ids"] = generated.token_ids
        message["generation_log_probs"] = generated.log_probs
        if logger.isEnabledFor(logging.DEBUG):
            self._log_stages(raw, prompt.token_ids, generated.token_ids, message)
        drawn = len(generated.token_ids)
        versions = generated.versions or []
        spans = [{"version": version, "tokens": tokens} for version, tokens in versions] if len(versions) > 1 else None
        cached = {} if generated.cached_tokens is None else {"cached_tokens": generated.cached_tokens}
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": log_probs}],
            "usage": {
                "prompt_tokens": len(prompt.token_ids),
                "completion_tokens": drawn,
                "total_tokens": len(prompt.token_ids) + drawn,
                "prompt_tokens_details": cached,
            },
            "policy_version": min(version for version, _ in versions),
            "version_spans": spans,
        }

    def _log_stages(self, request: bytes, prompt: list[int], generated: list[int], message: dict[str, Any]) -> None:
        """Log a call's content in each of its stages, to locate lost tokens."""
        fields = {name: value for name, value in message.items() if name not in TOKEN_FIELDS}
        stages = (
            request.decode(errors="replace"),
            self.codec.tokenizer.decode(prompt, skip_special_tokens=False),
            prompt,
            generated,
            self.codec.tokenizer.decode(generated, skip_special_tokens=False),
            fields,
        )
        for stage, what in zip(CallStage, stages, strict=True):
            logger.debug("%s: %s", stage.value, what)


def token_list(tokens: list[int], max_model_len: int) -> dict[str, Any]:
    """The answer of /tokenize, in vLLM's shape."""
    return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": None}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, for another application to read; then whatever follows it (the caller leaves)."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> dict[str, Any]:
        return unread.pop() if unread else await receive()

    return again


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}") from error


METRICS = {
    "roundhouse_engine_ready": "Whether the replica answers with the wanted version.",
    "roundhouse_engine_policy_version": "Version that it answers with; -1 before the first.",
    "roundhouse_engine_wanted_version": "Requested version; -1 before the first.",
    "roundhouse_engine_generated_tokens_total": "Tokens of its answers since it started.",
    "roundhouse_engine_refits_total": "Refits since it started.",
    "roundhouse_engine_refit_seconds": "Duration of the newest refit.",
}


def holds_desired_version(status: dict[str, Any]) -> bool:
    """Return whether a replica (`ServedPolicy.status`) answers with the newest requested version."""
    desired = status["desired"] or {}
    return bool(
        status["ready"]
        and desired.get("weights") is not None
        and (status["policy_version"], status["weights"]) == (desired.get("policy_version"), desired.get("weights"))
    )


def metrics_page(status: dict[str, Any]) -> str:
    """The replica's own metrics, in Prometheus' text format."""
    desired_version = (status["desired"] or {}).get("policy_version")
    values = {
        "roundhouse_engine_ready": int(holds_desired_version(status)),
        "roundhouse_engine_policy_version": -1 if status["policy_version"] is None else status["policy_version"],
        "roundhouse_engine_wanted_version": -1 if desired_version is None else desired_version,
        "roundhouse_engine_generated_tokens_total": status["generated_tokens"],
        "roundhouse_engine_refits_total": status["refits"],
        "roundhouse_engine_refit_seconds": status["refit_seconds"],
    }
    lines = []
    for name, meaning in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {float(values[name])}"]
    return "\n".join(lines) + "\n"


async def engine_metrics_page(app: AsgiApp | None) -> bytes:
    """Return the engine's metrics page; empty without one."""
    if app is None:
        return b""
    messages: list[dict[str, Any]] = []

    async def keep(message: dict[str, Any]) -> None:
        messages.append(message)

    async def nothing() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/metrics",
        "raw_path": b"/metrics",
        "query_string": b"",
        "headers": [],
    }
    await app(
        scope | {"http_version": "1.1", "scheme": "http", "root_path": "", "client": None, "server": None},
        nothing,
        keep,
    )
    if not messages or messages[0].get("status") != 200:
        return b""
    return b"".join(message.get("body", b"") for message in messages[1:])
