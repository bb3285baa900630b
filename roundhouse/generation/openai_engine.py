"""Rollouts generated at a foreign server: `generation.backend: openai`, any endpoint of OpenAI's completions API that
takes a prompt of token IDs and returns token IDs with their log-probabilities (vLLM's server does).

Invariant: requests contain only token IDs, and replies only token IDs with log-probabilities. Conversations are
rendered and tool calls read here, with the policy's tokenizer, so the next prompt begins with exactly the tokens so
far. A server that returns neither is refused at its start, because its answers could not be trained on or proved.
(`TextEngine` serves evaluations and collections with such a server, the plug-in `sglang` everything by SGLang's own routes.)

    POST /v1/completions   prompt: [ids], return_token_ids, logprobs ──> token_ids, logprobs.token_logprobs

Weights: with `endpoint.weight_update: vllm`, a refit lets the server read the checkpoint's directory, by the class that
also runs in our vLLM workers and proves that the model computes with it (`vllm_worker.RefitExtension`): on CPU, vLLM's
`reload_weights` leaves the head of a model with tied embeddings on the old weights, without an error. Without the key,
the server counts as version 0, and other versions are refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from roundhouse.config.generation import Endpoint, InflightRequests, training_endpoints
from roundhouse.config.models import GenerationConfig
from roundhouse.config.secrets import read_secret
from roundhouse.errors import ConfigError
from roundhouse.generation.chat import ChatCodec
from roundhouse.generation.protocol import (
    ALL_TOKENS,
    NEUTRAL_SAMPLING,
    AsgiApp,
    BadReply,
    BadRequest,
    Draw,
    EnginePoisoned,
    EngineUnreachable,
    Generated,
    WeightsRefused,
)
from roundhouse.generation.transformers_engine import OpenAIRoutes
from roundhouse.generation.vllm_engine import WORKER_EXTENSION
from roundhouse.http.clients import async_http_client, proxy_note
from roundhouse.http.replies import MALFORMED
from roundhouse.trajectories.records import SEEDS
from roundhouse.trajectories.storable import call_problem, shown, storable_text

TOKENS = "return_token_ids"


REMEDY = (
    f"Name a server that supports {TOKENS} and logprobs, such as vLLM's; set generation.endpoint.kind to sglang for SGLang's; "
    "or to text, and the server serves evaluations and collections, but no training."
)


def read_tokens(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return token IDs and log-probabilities of a completion's choice.

    Raises:
        BadReply: they are missing, differ in number, or are not numbers of these kinds.
        AttributeError: the choice has another shape.
    """
    ids, log_probs = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
    return checked_tokens(ids, log_probs)


def checked_tokens(ids: Any, log_probs: Any) -> tuple[list[int], list[float]]:
    """Return token IDs and log-probabilities as they are.

    Raises:
        BadReply: they are missing, differ in number, or are not numbers of these kinds.
    """
    if problem := call_problem([], ids, log_probs, 0):
        raise BadReply(f"It returned tokens that cannot be recorded: {problem}.")
    if not ids or len(log_probs) != len(ids):
        raise BadReply(f"It returned {len(ids)} token IDs with {len(log_probs)} log-probabilities.")
    if min(ids) < 0:
        raise BadReply(f"It returned the token ID {min(ids)}.")
    return ids, log_probs


@contextmanager
def reading(url: str, path: str) -> Iterator[None]:
    """Read a reply within the block.

    Raises:
        BadReply: the block finds another shape than it reads.
    """
    try:
        yield
    except MALFORMED as error:
        raise BadReply(
            f"{url}{path} answered 200 with another shape: {type(error).__name__}: {shown(error)}."
        ) from error


class OpenAIEngine:
    """`Engine` over an endpoint."""

    @classmethod
    def trial(cls, model: str) -> tuple[str, dict[str, Any]]:
        """Return route and body of a request for one token, as the engine asks for tokens."""
        return "/v1/completions", {"model": model, "prompt": [0, 1], "max_tokens": 1, "logprobs": 0, TOKENS: True}

    @classmethod
    def read_trial(cls, reply: Any) -> tuple[list[int], list[float]]:
        """Return the tokens of the answer to `trial` with their log-probabilities.

        Raises:
            BadReply, ValueError, LookupError, TypeError, AttributeError: it lacks them.
        """
        return read_tokens(reply["choices"][0])

    def __init__(self, config: GenerationConfig, codec: ChatCodec) -> None:
        assert config.endpoint is not None, "refused at load (config.generation)"
        self.max_model_len = config.max_model_len
        self._endpoint: Endpoint = config.endpoint
        self._codec, self._stops = codec, sorted(codec.stop_token_ids)
        self._app = OpenAIRoutes(codec)
        self._refit_seconds = config.refit_timeout_seconds
        secret = None if (name := config.endpoint.api_key_variable) is None else read_secret(name)
        self._http: httpx.AsyncClient = async_http_client(
            httpx,
            config.endpoint.url,
            foreign=True,
            headers={} if secret is None else {"Authorization": f"Bearer {secret}"},
            timeout=config.request_timeout_seconds,
            limits=httpx.Limits(max_connections=None),
        )

    async def start(self) -> None:
        """Find the model, and test the server's reply with one token.

        Raises:
            ConfigError: the model is not served, has less context than `generation.max_model_len`, or its replies lack
                tokens.
            EngineUnreachable: the server does not answer.
        """
        name, url = self._endpoint.model, self._endpoint.url
        models = await self._call("GET", "/v1/models")
        with reading(url, "/v1/models"):
            served = {str(each["id"]): each.get("max_model_len") for each in models["data"]}
        if name not in served:
            raise ConfigError(
                f"generation.endpoint.model is {name!r}, but {url} serves {', '.join(sorted(served)) or 'nothing'}."
            )
        context = served[name]
        if isinstance(context, int) and context < self.max_model_len:
            raise ConfigError(
                f"generation.max_model_len is {self.max_model_len}, but {url} serves {name} with {context} tokens. Lower the "
                "first, or start the server with more."
            )
        try:
            await self.generate([0, 1], Draw(max_tokens=1, temperature=0.0))
        except BadReply as error:
            raise ConfigError(
                f"generation.endpoint.url is {url}, and its answers cannot be trained on or verified: {error} {REMEDY}"
            ) from error

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """Generate; see `Engine.generate`.

        Raises:
            EngineUnreachable: the server does not answer, or refuses.
            BadReply: its answer lacks tokens.
        """
        body = {
            "prompt": list(prompt_token_ids),
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k or ALL_TOKENS,
            **NEUTRAL_SAMPLING,
            "seed": None if draw.seed is None else draw.seed % SEEDS,
            "stop_token_ids": self._stops,
            "logprobs": 0,
            TOKENS: True,
        }
        with reading(self._endpoint.url, "/v1/completions"):
            return self._generated(*read_tokens(await self._complete(body)))

    def _generated(self, ids: list[int], log_probs: list[float]) -> Generated:
        if not math.isfinite(sum(log_probs)):
            raise EnginePoisoned(f"{self._endpoint.url} returned the log-probabilities {log_probs[:8]}.")
        return Generated(ids, log_probs, "stop" if ids[-1] in self._stops else "length")

    async def load_weights(
        self, directory: str, version: int = 0, running: InflightRequests = "drain", keep_prefix_cache: bool = False
    ) -> None:
        """Load weights; see `Engine.load_weights`.

        Raises:
            WeightsRefused: the server cannot receive another version.
            EnginePoisoned: loading failed, and the server may hold a mixture. The next load is whole and proved again.
        """
        if self._keeps_weights(version):
            return
        load = {"method": "roundhouse_load", "args": [directory], "timeout": self._refit_seconds}
        try:
            reply = await self._call("POST", "/collective_rpc", load, seconds=self._refit_seconds)
            with reading(self._endpoint.url, "/collective_rpc"):
                proved = [int(layers) for layers in reply["results"]]
            await self._call("POST", "/reset_prefix_cache", seconds=self._refit_seconds)
        except (EngineUnreachable, BadReply) as error:
            raise EnginePoisoned(
                f"The server did not load {directory}: {error} It needs VLLM_SERVER_DEV_MODE=1, --worker-extension-cls "
                f"{WORKER_EXTENSION}, and to see the directory at the same path."
            ) from error
        if not proved or min(proved) < 1:
            raise EnginePoisoned(f"Of the server's workers, not each has proved that it holds {directory}: {proved}.")

    def _keeps_weights(self, version: int) -> bool:
        """Return whether the server keeps its weights, which are version 0.

        Raises:
            WeightsRefused: such a server cannot serve the wanted version.
        """
        if self._endpoint.weight_update is None and version != 0:
            raise WeightsRefused(
                f"{self._endpoint.url} holds version 0. It cannot load version {version} because "
                f"generation.endpoint.weight_update is unset. Set it."
            )
        return self._endpoint.weight_update is None

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        ids = list(token_ids)
        with reading(self._endpoint.url, "/v1/completions"):
            choice = await self._complete({"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
            log_probs = choice.get("prompt_logprobs") or []
            if len(log_probs) != len(ids):
                raise BadReply(f"It returned {len(log_probs)} log-probabilities of a prompt of {len(ids)} tokens.")
            values = [at[str(token)]["logprob"] for token, at in zip(ids[1:], log_probs[1:], strict=True)]
            return self._generated(*checked_tokens(ids[1:], values)).log_probs if values else []

    async def sleep(self) -> None:
        """It is refused at load: the server's memory is its own."""

    async def wake(self) -> None:
        """See `sleep`."""

    async def check_health(self) -> None:
        await self._call("GET", "/v1/models")

    def openai_app(self) -> AsgiApp | None:
        return self._app

    def shutdown(self) -> None:
        """Connections end with the process; the server stays."""

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._call("POST", "/v1/completions", {"model": self._endpoint.model} | body)
        with reading(self._endpoint.url, "/v1/completions"):
            choice: dict[str, Any] = reply["choices"][0]
            if not isinstance(choice, dict):
                raise TypeError(f"a choice is {shown(choice)}")
        return choice

    async def _call(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> Any:
        timeout: Any = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        try:
            reply = await self._http.request(method, path, json=body, timeout=timeout)
        except (TimeoutError, httpx.HTTPError) as error:
            raise EngineUnreachable(
                f"{self._endpoint.url}{path} does not answer: {type(error).__name__}: {error}. Is it running, and "
                f"generation.endpoint.url right?{proxy_note(self._endpoint.url)}"
            ) from error
        try:
            reply.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise EngineUnreachable(
                f"{self._endpoint.url}{path} answered {reply.status_code}: {reply.text[:500]}{proxy_note(self._endpoint.url)}"
            ) from error
        with reading(self._endpoint.url, path):
            return reply.json() if reply.content else None


logger = logging.getLogger(__name__)


_LLAMA_NEUTRAL = {"repeat_penalty": 1.0, "typical_p": 1.0}
"""Names that llama.cpp and Ollama have for fields that others do not know."""


class TextEngine(OpenAIEngine):
    """`Engine` over a server that returns only text: `generation.endpoint.kind: text`.

    Invariant: its answers do not contain log-probabilities, so they are never trained on: training is refused before it
    starts, and validation quarantines the rollouts. The prompt is sent as the text of its tokens; an answer's token IDs
    are the policy tokenizer's reading of the text, not the server's samples, and its weights are not proved.

        POST /v1/completions   prompt: "…", stop: ["<|im_end|>"] ──> text, finish_reason
    """

    def __init__(self, config: GenerationConfig, codec: ChatCodec) -> None:
        super().__init__(config, codec)
        self._extensions: dict[str, Any] = {"top_k": ALL_TOKENS, **NEUTRAL_SAMPLING, **_LLAMA_NEUTRAL}

    async def start(self) -> None:
        """Start as `OpenAIEngine.start` does. A server that refuses fields beyond OpenAI's does not sample by them,
        and receives none."""
        try:
            await super().start()
        except EngineUnreachable as error:
            reply = error.__cause__.response if isinstance(error.__cause__, httpx.HTTPStatusError) else None
            if reply is None or reply.status_code not in (400, 422):
                raise
            self._extensions = {name: NEUTRAL_SAMPLING[name] for name in ("frequency_penalty", "presence_penalty")}
            await super().start()
            logger.warning(
                "%s refuses min_p, repetition_penalty and top_k: requests do not name them.", self._endpoint.url
            )
        logger.warning(
            "%s returns text without log-probabilities (generation.endpoint.kind: text): it serves evaluations and "
            "collections, no training, and which weights it holds is not proved.",
            self._endpoint.url,
        )

    async def generate(self, prompt_token_ids: Sequence[int], draw: Draw) -> Generated:
        """See `OpenAIEngine.generate`; without log-probabilities.

        Raises:
            BadRequest: the prompt spells control tokens as text.
        """
        tokenizer = self._codec.tokenizer
        if spelled := self._codec.control.spelled_in(prompt_token_ids):
            raise BadRequest(
                f"The messages spell {spelled} control tokens, which a server of text reads as the template's. Remove them "
                f"from the task, or set generation.endpoint.kind to {' or '.join(training_endpoints())}.",
                "messages",
            )
        body = {
            "prompt": tokenizer.decode(list(prompt_token_ids), skip_special_tokens=False),
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            **self._extensions,
            "stop": [tokenizer.convert_ids_to_tokens(stop) for stop in self._stops],
        }
        if draw.top_k is not None:
            body["top_k"] = draw.top_k
        if draw.seed is not None:
            body["seed"] = draw.seed % SEEDS
        choice = await self._complete(body)
        text, ended = choice.get("text"), choice.get("finish_reason") != "length"
        if not isinstance(text, str):
            raise BadReply(f"It returned no text: {shown(choice)}.")
        text = storable_text(text)
        ids = self._codec.encode(text) + [self._codec.end_of_turn_id] * ended
        if not ids:
            raise BadReply("It returned an empty text that is not at its end.")
        return Generated(ids, [], "stop" if ended else "length")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return an empty list: the server does not report log-probabilities."""
        return []
